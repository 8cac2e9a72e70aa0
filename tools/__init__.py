"""Programs that build and check the project. Releases do not contain them."""
