"""The component that stores chosen sizes, and the hits of each tier in the status."""
