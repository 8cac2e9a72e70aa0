"""Build images and print their sizes.

python -m tools.images [NAME...]
"""

from __future__ import annotations

import argparse
import sys

from tools.images.build import IMAGES, ImagesError, build


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all; {', '.join(IMAGES)}")
    names = parser.parse_args().names or list(IMAGES)
    if unknown := set(names) - set(IMAGES):
        parser.error(f"unknown image {', '.join(sorted(unknown))}: choose from {', '.join(IMAGES)}")
    too_large = False
    for name in names:
        try:
            image = build(name)
        except ImagesError as error:
            print(error, file=sys.stderr)
            return 1
        limit = IMAGES[name].max_bytes
        too_large |= limit is not None and image.size_bytes > limit
        bar = f"of at most {limit >> 20}" if limit else ""
        print(f"{name:<9} {image.size_bytes / 2**20:5.0f} MiB {bar:<15} {image.reference}  {image.archive}")
    if too_large:
        print("an image exceeds its limit", file=sys.stderr)
    return int(too_large)


if __name__ == "__main__":
    sys.exit(main())
