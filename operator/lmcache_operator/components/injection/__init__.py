"""The cache for pods that somebody else makes: of Deployments and the like that exist already."""
