"""Evidence about a release: signatures, SBOMs, provenance statements, licences and known vulnerabilities."""
