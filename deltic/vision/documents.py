"""Extracts the text of PDF documents with pypdf."""

from __future__ import annotations

import io
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

from deltic.errors import RequestError
from deltic.vision.decoder_process import Decoded, DecoderProcess

if TYPE_CHECKING:
    from deltic.config import Limits

NO_TEXT: Final = "[a PDF document without text, such as a scan: its pages cannot be read]"
"""Replaces the text of a document that has none."""
_MEMORY_MIB: Final = 512


def reader_process() -> DecoderProcess:
    """Returns a process for several calls of `pdf_text`; `stop` ends it from any thread."""
    return DecoderProcess(_MEMORY_MIB)


def pdf_text(data: bytes, limits: Limits, field: str = "document", process: DecoderProcess | None = None) -> str:
    """Returns the text of a PDF file, its pages separated by empty lines; `NO_TEXT` if there is none.

    Blocks until a child process has read the file. process: one of `reader_process`, which the caller closes. Raises
    RequestError with `field` if the file is damaged, encrypted, or exceeds `max_document_pages`,
    `max_document_characters` or `document_seconds`.
    """
    try:
        with nullcontext(process) if process else reader_process() as reader:
            _, text = reader.call(read_pages, data, limits.max_document_pages, limits.max_document_characters,
                                  seconds=limits.document_seconds, limit="document_seconds")
    except RequestError as error:
        raise RequestError(f"{field} is no PDF document that can be read: {error}", field) from error
    return text.decode() or NO_TEXT


def read_pages(data: bytes, max_pages: int, max_characters: int) -> Decoded:
    """Returns the text of all pages in UTF-8. Runs in the child process. Raises RequestError."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    if b"%PDF-" not in data[:1024]:
        raise RequestError("it does not begin as one")
    try:
        reader = PdfReader(io.BytesIO(data))
        count = len(reader.pages)
        if count > max_pages:
            raise RequestError(f"it has {count:,} pages, and at most {max_pages:,} are read (max_document_pages)")
        texts, size = list[str](), 0
        for page in reader.pages:
            texts.append(page.extract_text().encode(errors="replace").decode().strip())
            size += len(texts[-1])
            if size > max_characters:
                raise RequestError(f"it has more than {max_characters:,} characters (max_document_characters)")
    except (FileNotDecryptedError, DependencyError) as error:
        raise RequestError("it is encrypted: send it without a password") from error
    except RecursionError as error:
        raise RequestError("it is nested too deeply") from error
    return {}, "\n\n".join(filter(None, texts)).encode()
