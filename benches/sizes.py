"""Parses sizes in the notation of the ferrywire command: 65536, 64K, 1M, 1G."""

import re


def parse(text):
    found = re.fullmatch(r"(\d+)([KMG]?)", text.strip(), re.IGNORECASE)
    if not found or not int(found[1]):
        raise ValueError(f"a size of {text!r}: give bytes, or a number with K, M or G")
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2].upper()]
