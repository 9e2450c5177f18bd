"""Places within a JSON document, as references name them (RFC 6901)."""

from collections.abc import Iterator
from urllib.parse import unquote


def escape(key: str) -> str:
    """A key as it stands in a pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def parts(reference: str) -> Iterator[str]:
    """The keys of a pointer in a fragment: behind `#/`."""
    for part in reference.split("/")[1:]:
        yield unquote(part).replace("~1", "/").replace("~0", "~")
