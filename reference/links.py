"""A hook of MkDocs: links to files of the repository that are no pages become their plain names.

On the web the repository is not beside the page. docs/ itself is read in a checkout too, where they
lead to the files.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?![a-z]+:|#)([^)#\s]+)(?:#[^)\s]*)?\)")


def plain(markdown: str, source: str) -> str:
    """The text of a page with no links out of docs/, or to a whole folder.

    Args:
        markdown: of the page.
        source: path of the page in docs/.
    """

    def named(link: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        outside = place.startswith("..") or link[2].endswith("/")
        return link[1] if outside else link[0]

    return _LINK.sub(named, markdown)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """What MkDocs calls for each page."""
    return plain(markdown, page.file.src_uri)
