"""The text of PDF documents: what it is, and that a hostile file costs no more than its bounds."""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Iterator

import pytest

from deltic.config import Limits
from deltic.errors import RequestError
from deltic.vision.decoder_process import NO_TEXT, DecoderProcess, pdf_text, read_pages, reader_process

Objects = list[bytes]


def written(objects: Objects) -> bytes:
    """A PDF file of these objects, the first of which is its catalog."""
    out, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return out + (b"xref\n0 %d\n0000000000 65535 f \n%strailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF"
                  % (len(objects) + 1, table, len(objects) + 1, len(out)))


def stream(content: bytes, more: bytes = b"") -> bytes:
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(content), more, content)


def drawing(*contents: bytes) -> bytes:
    """A PDF file whose pages have these streams as contents."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [%s] /Count %d >>" % (
        b" ".join(b"%d 0 R" % (4 + 2 * index) for index in range(len(contents))), len(contents)),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    for content in contents:
        objects += [b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
                    b"/Resources << /Font << /F1 3 0 R >> >> >>" % (len(objects) + 2), content]
    return written(objects)


def line(text: str) -> bytes:
    return b"BT /F1 12 Tf 72 720 Td (%s) Tj ET" % text.encode()


def document(*texts: str) -> bytes:
    return drawing(*(stream(line(text)) for text in texts))


@pytest.fixture(scope="module")
def process() -> Iterator[DecoderProcess]:
    """One child for all documents that do it no harm."""
    with reader_process() as reader:
        yield reader


def test_text_of_all_pages(process: DecoderProcess) -> None:
    assert pdf_text(document("The door code is 4711.", "Second page."), Limits()) == (
        "The door code is 4711.\n\nSecond page.")
    packed = stream(zlib.compress(line("packed")), b"/Filter /FlateDecode")
    assert pdf_text(drawing(packed), Limits(), process=process) == "packed"
    assert pdf_text(document("", ""), Limits(), process=process) == NO_TEXT


def test_files_that_are_no_documents_are_refused_by_field(process: DecoderProcess) -> None:
    for data, said in ((b"", "does not begin as one"), (b"\x89PNG\r\n", "does not begin as one"),
                       (b"%PDF-1.7\nnothing", "cannot be read"), (document("a")[:200], "cannot be read")):
        with pytest.raises(RequestError, match=rf"messages\[0\].*{said}") as caught:
            pdf_text(data, Limits(), "messages[0].content[1]", process)
        assert caught.value.field == "messages[0].content[1]"


def test_limits_of_pages_and_characters(process: DecoderProcess) -> None:
    with pytest.raises(RequestError, match=r"3 pages.*max_document_pages"):
        pdf_text(document("a", "b", "c"), Limits(max_document_pages=2), process=process)
    with pytest.raises(RequestError, match="max_document_characters"):
        pdf_text(document("a" * 60, "b" * 60), Limits(max_document_characters=100), process=process)


def loop_of_pages() -> bytes:
    return written([b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [2 0 R 2 0 R] /Count 9999999 >>"])


def bomb() -> bytes:
    """Many operators, of which the file holds a thousandth."""
    return drawing(*[stream(zlib.compress(line("a") * (1 << 20)), b"/Filter /FlateDecode")] * 4)


def forms() -> bytes:
    """Each of a chain of forms draws the next one ten times."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
               b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R "
               b"/Resources << /XObject << /X 5 0 R >> >> >>", stream(b"/X Do " * 10)]
    for number in range(6, 26):
        objects.append(stream(b"/X Do " * 10, b"/Type /XObject /Subtype /Form /BBox [0 0 9 9] "
                                              b"/Resources << /XObject << /X %d 0 R >> >>" % number))
    return written([*objects, stream(line("end"), b"/Type /XObject /Subtype /Form /BBox [0 0 9 9]")])


MEASURED = """
import resource, sys
from deltic.config import Limits
from deltic.errors import RequestError
from deltic.vision.decoder_process import pdf_text
try:
    text = pdf_text(sys.stdin.buffer.read(), Limits(document_seconds=0.5))
    assert len(text) <= Limits().max_document_characters
except RequestError as error:
    assert error.field == "document"
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss)
"""
"""Prints the processor time and the memory (KiB) of the child. The system counts a parent's memory as its child's, so
the parent must be small."""


@pytest.mark.parametrize("data", [loop_of_pages(), bomb(), forms()], ids=["loop", "bomb", "forms"])
def test_hostile_documents_stay_within_bounds(data: bytes) -> None:
    found = subprocess.run([sys.executable, "-c", MEASURED], input=data, capture_output=True, check=True)
    seconds, memory = map(float, found.stdout.split())
    assert seconds < 2.0 and memory <= 512 << 10


def test_document_that_needs_too_much_memory_is_refused() -> None:
    """The child's bound holds where the library has none of its own."""
    zeros = zlib.compress(bytes(1 << 27), 9)
    data = drawing(stream(zeros, b"/Filter /FlateDecode"))
    with pytest.raises(RequestError, match=r"is no PDF document that can be read"):
        pdf_text(data, Limits(document_seconds=2.0))


def test_read_pages_in_this_process() -> None:
    assert read_pages(document("a", "b"), 2, 100) == ({}, b"a\n\nb")
