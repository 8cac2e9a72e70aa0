"""Images of a release and of tests, built from their Dockerfiles without a container engine."""

from tools.images.build import IMAGES, Image, ImagesError, build, find

__all__ = ["IMAGES", "Image", "ImagesError", "build", "find"]
