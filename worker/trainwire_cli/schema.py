"""`trainwire schema`: the JSON Schema of the protocol and of the config."""

import argparse
import json

from trainwire_protocol.schema import build_schema


def run(words: list[str]) -> int:
    """Print the schema, whole or one definition of it."""
    parser = argparse.ArgumentParser(prog="trainwire schema", description=__doc__)
    parser.add_argument("definition", nargs="?", help="one definition only, for instance Config or StepEvent")
    chosen = parser.parse_args(words).definition
    schema = build_schema()
    if chosen is not None:
        if chosen not in schema["$defs"]:
            parser.error(f"there is no definition {chosen!r}; there are {', '.join(sorted(schema['$defs']))}")
        schema = schema["$defs"][chosen]
    print(json.dumps(schema, indent=2))
    return 0
