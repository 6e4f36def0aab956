"""The memory reader: it reads every word that it says it reads, whatever the size."""

import mmap

import numpy as np
import pytest

from flashmoe_jax.native import Library, streams

LINE_WORDS = 8


@pytest.mark.parametrize("num_streams", streams.STREAMS)
@pytest.mark.parametrize("num_words", [0, 1, 8, 31, 32, 33, 1000, 4096])
def test_every_whole_line_is_read_once(library: Library, num_streams: int, num_words: int) -> None:
    del library  # skips the test where there is none
    read = streams.library_reader()
    assert read is not None
    words = np.random.default_rng(num_words).integers(0, 1 << 63, num_words, np.uint64)
    whole = num_words // num_streams // LINE_WORDS * LINE_WORDS * num_streams
    assert read(words, num_streams) == int(np.add.reduce(words[:whole]))


def test_the_rate_is_that_of_the_whole_block() -> None:
    block = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint16).reshape(64, -1)
    seen: list[tuple[int, int, int]] = []

    def read(words: np.ndarray, num_streams: int) -> None:
        seen.append((words.ctypes.data, words.nbytes, num_streams))

    assert streams.read_rate(block, 2, read) > 0
    assert {size for _, size, _ in seen} == {block.nbytes // streams.num_cores() // 4096 * 4096}
    assert sorted(at for at, _, _ in seen)[0] == block.ctypes.data
    assert len({at for at, _, _ in seen}) == streams.num_cores()
    assert {num_streams for _, _, num_streams in seen} == {2}


def test_numpy_reads_where_the_library_is_missing() -> None:
    block = np.ones(1 << 14, np.uint64)
    assert streams.read_rate(block, 1, streams.numpy_reader) > 0
    with pytest.raises(AssertionError, match="one stream"):
        streams.numpy_reader(block, 4)
