"""Text cut into rows as it streams by: lines, and the elements of one JSON array. Bytes in, bytes out."""

import re
from collections.abc import Iterable, Iterator

from hsray.prompts.files import ReadError
from hsray.prompts.source import MAX_ROW_BYTES


def lines(blocks: Iterable[bytes], *, strip: bytes | None = None) -> Iterator[tuple[int, bytes | None]]:
    """(line number, line) for each line that is not blank; None for a line over `MAX_ROW_BYTES`.

    Wherever the blocks are cut. Lines end with a line feed, and white space around them is taken off, so a
    carriage return in front of it too; with `strip`, these characters at the end alone.
    """
    number = 1
    pending: list[bytes] = []  # the pieces of the line that is not complete yet
    size = 0
    for block in blocks:
        first, *others = block.split(b"\n")
        pieces = [first]
        for other in others:
            yield from _line(number, [*pending, *pieces], size + len(pieces[0]), strip)
            number, pending, size, pieces = number + 1, [], 0, [other]
        size += len(pieces[0])
        # Of a line over the limit only the size is kept.
        pending = [*pending, *pieces] if size <= MAX_ROW_BYTES else []
    yield from _line(number, pending, size, strip)


def _line(number: int, pieces: list[bytes], size: int, strip: bytes | None) -> Iterator[tuple[int, bytes | None]]:
    if size > MAX_ROW_BYTES:
        yield number, None
        return
    line = b"".join(pieces)
    stripped = line.strip()
    if stripped:
        yield number, stripped if strip is None else line.rstrip(strip)


_OUTSIDE_STRING = re.compile(rb'["\[\]{}]')
_OUTSIDE_ELEMENT = re.compile(rb'["\[\]{},]')
_INSIDE_STRING = re.compile(rb'["\\]')


class _ArrayScanner:
    """Finds where the elements of one top-level JSON array begin and end, without parsing them.

    Bytes are enough: every structural character of JSON is ASCII, and no byte of a UTF-8 sequence is. Each
    byte is looked at once, so a single element of many megabytes costs no more than many small ones.
    """

    def __init__(self) -> None:
        self.depth = 0  # 0: before or after the array, 1: between elements
        self.closed = False
        self._in_string = False
        self._skip = 0  # bytes of an escape that lie in the next block

    def cuts(self, block: bytes) -> Iterator[int]:
        """Positions in `block` of the brackets of the array and of the commas between its elements."""
        position, self._skip = self._skip, max(0, self._skip - len(block))
        while position < len(block):
            if self._in_string:
                match = _INSIDE_STRING.search(block, position)
                if match is None:
                    return
                position = match.end()
                if match[0] == b'"':
                    self._in_string = False
                else:
                    position += 1
                    self._skip = max(0, position - len(block))
                continue
            match = (_OUTSIDE_ELEMENT if self.depth == 1 else _OUTSIDE_STRING).search(block, position)
            if match is None:
                return
            position = match.end()
            if match[0] == b'"':
                self._in_string = True
            elif match[0] in b"[{":
                self.depth += 1
                if self.depth == 1:
                    yield match.start()
            elif match[0] == b",":
                yield match.start()
            else:
                self.depth -= 1
                if self.depth == 0:
                    self.closed = True
                    yield match.start()
                    return


def array_elements(blocks: Iterable[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """(element number, element) of a top-level JSON array; None for an element over `MAX_ROW_BYTES`.

    Wherever the blocks are cut.

    Raises:
        ReadError: the array is not closed, or something follows it.
    """
    scanner = _ArrayScanner()
    number = 0  # elements begun; 0 before the opening bracket
    pending: list[bytes] = []
    size = 0
    for block in blocks:
        if scanner.closed:
            _nothing_follows(block)
            continue
        start = 0
        for cut in scanner.cuts(block):
            if number:
                piece = block[start:cut]
                too_large = size + len(piece) > MAX_ROW_BYTES
                element = None if too_large else b"".join([*pending, piece]).strip()
                # `[]` has no element; `[1,]` has an empty second one, which is a bad row.
                if element != b"" or number > 1 or not scanner.closed:
                    yield number, element
            number, pending, size, start = number + 1, [], 0, cut + 1
        if scanner.closed:
            _nothing_follows(block[start:])
        elif number:
            size += len(block) - start
            pending = [*pending, block[start:]] if size <= MAX_ROW_BYTES else []
    if not scanner.closed:
        raise ReadError("the JSON array is not closed: the file was cut, or an element has unbalanced brackets")


def _nothing_follows(rest: bytes) -> None:
    if rest.strip():
        raise ReadError("something follows the end of the JSON array")
