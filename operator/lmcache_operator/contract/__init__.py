"""The contract between the reconciler and components: objects, answers of sidecars, and conditions."""
