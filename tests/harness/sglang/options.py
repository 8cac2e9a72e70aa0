"""A program with SGLang's modules: prints all names of each option, and the values of arguments, as JSON."""

import argparse
import json
import sys

from sglang.srt.server_args import ServerArgs

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    parsed = vars(parser.parse_args(sys.argv[1:]))
    options = {name: action.option_strings for action in parser._actions for name in action.option_strings}
    print(json.dumps({"options": options, "parsed": {name: str(value) for name, value in parsed.items()}}))
