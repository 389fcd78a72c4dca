"""Events in gzip, each compressed once for all streams."""

from __future__ import annotations

import gzip
import zlib

from hypothesis import given
from hypothesis import strategies as st

from understudy.service.page.parts import Chunk, GzipStream, compressed, stored

contents = st.binary(max_size=200)
chunks = st.lists(st.builds(compressed, contents) | st.builds(stored, contents))


@given(chunks)
def test_each_chunk_can_be_read_as_soon_as_it_has_arrived_and_the_whole_is_a_file_of_gzip(
    sent: list[Chunk],
) -> None:
    stream, reader = GzipStream(), zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    whole = stream.begin()
    reader.decompress(whole)
    for chunk in sent:
        bytes_sent = stream.add(chunk)
        whole += bytes_sent
        assert reader.decompress(bytes_sent) == chunk.plain
    whole += stream.end()

    assert gzip.decompress(whole) == b"".join(chunk.plain for chunk in sent)


def test_an_event_is_smaller_than_its_text() -> None:
    text = b"<td>0.125</td><td>0.25</td>" * 100

    assert len(compressed(text).deflated) < len(text) / 10
