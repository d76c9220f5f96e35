"""Patterns that are made from texts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any


def any_of(texts: Iterable[str]) -> str:
    """Write a pattern that matches the longest of some texts, as a tree of their beginnings."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for sign in text:
            node = node.setdefault(sign, {})
        node[""] = {}

    def written(node: dict[str, Any]) -> str:
        branches = [re.escape(sign) + written(below) for sign, below in node.items() if sign]
        if not branches:
            return ""
        body = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
        return body + "?" if "" in node else body

    return written(tree)
