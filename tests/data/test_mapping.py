"""Maps of files that are cut short while they are read: an error in the thread that reads, and not the end of the process."""

import gc
import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import barellm
from barellm.checkpoint import storage, tensorfile
from barellm.data import mapping
from barellm.data.shards import TokenStream, inspect_shard, magic_for, open_shard, write_shard

BYTES = 1 << 20
TINY: dict[str, Any] = {
    "steps": 6,
    "batch": 2,
    "seq": 16,
    "model": {"layers": 1, "heads": 2, "d_model": 16, "max_seq": 16},
    "train": {"eval_every": 0, "sample_every": 0, "dtype": "fp32"},
}


@pytest.fixture
def cut(tmp_path):
    """A map of a file that has but its first page."""
    path = tmp_path / "numbers.bin"
    path.write_bytes(bytes([7]) * BYTES)
    found = mapping.mapped(path)
    assert int(found[-1]) == 7
    os.truncate(path, mapping.mmap.PAGESIZE)
    return found


def test_what_is_cut_off_reads_as_zeros_and_is_told(cut):
    assert int(cut.sum(dtype=np.int64)) == 7 * mapping.mmap.PAGESIZE
    with pytest.raises(mapping.LostFile, match=r"numbers\.bin was cut short or its disk failed while it was read"):
        mapping.check()


def test_what_another_thread_found_cut_off_is_told_to_who_has_read_it_too(cut, tmp_path):
    """The page is zeros for all. It says nothing of other files."""
    (tmp_path / "other").write_bytes(bytes([3]) * BYTES)
    other = mapping.mapped(tmp_path / "other")
    thread = threading.Thread(target=lambda: cut.max())
    thread.start()
    thread.join()
    mapping.check()
    mapping.check([other])
    for _ in range(2):
        with pytest.raises(mapping.LostFile):
            mapping.check([other, cut[5:]])


def test_nothing_is_told_of_a_file_that_is_whole(tmp_path):
    (tmp_path / "x").write_bytes(bytes([3]) * BYTES)
    assert int(mapping.mapped(tmp_path / "x", np.uint16, offset=16, shape=5)[-1]) == 0x303
    mapping.check()


@pytest.mark.extended
def test_a_map_that_is_gone_is_forgotten_with_its_fault(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(BYTES))
    found = mapping.mapped(path)[10:]
    os.truncate(path, 0)
    found.max()
    with pytest.raises(mapping.LostFile):
        mapping.check()
    del found
    gc.collect()
    mapping.check()
    assert path not in [path for _, path in mapping._maps.values()]


def test_a_map_of_somebody_elses_still_ends_the_process(tmp_path):
    code = f"""
import os, numpy as np
from barellm.data import mapping
path = {str(tmp_path / "x")!r}
open(path, "wb").write(bytes({BYTES}))
ours, theirs = mapping.mapped(path), np.memmap(path, np.uint8, "r")
os.truncate(path, 0)
print(int(ours[-1]), flush=True)
print(int(theirs[-1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-mapping.SIGBUS, "0\n")


def test_no_file_is_made_of_what_was_cut_off(cut, tmp_path):
    with pytest.raises(mapping.LostFile), storage.new_file(tmp_path / "copy", size=BYTES) as file:
        file.write(np.array(cut))
    assert [path.name for path in tmp_path.iterdir()] == ["numbers.bin"]


def test_no_folder_is_made_of_what_was_cut_off(cut, tmp_path):
    with pytest.raises(mapping.LostFile), storage.new_folder(tmp_path / "folder") as folder:
        storage.write_file(folder / "copy", cut.tobytes())
    assert [path.name for path in tmp_path.iterdir()] == ["numbers.bin"]


def shard(path):
    write_shard(path, [np.arange(40_000) % 250], magic=magic_for(256))
    return open_shard(path)


def test_shards_and_tensors(tmp_path):
    stream = TokenStream([shard(tmp_path / "a.bin"), shard(tmp_path / "b.bin")], name="two")
    header, nbytes = tensorfile.header_of({})
    assert nbytes == 0 and header
    os.truncate(tmp_path / "b.bin", 2048)
    assert stream.array(0, 100).tolist() == list(range(100))
    with pytest.raises(mapping.LostFile, match=r"b\.bin was cut"):
        stream.array(60_000, 60_100)
    with pytest.raises(barellm.errors.UserError, match=r"b\.bin has 2048 bytes"):
        inspect_shard(tmp_path / "b.bin")


@pytest.mark.extended
def test_a_run_whose_shard_is_cut_short_saves_and_ends_as_one_that_never_met_it(tmp_path, own_cache):
    def run(folder, *, cut_after=None, **more):
        def callback(step):
            if step.step == cut_after:
                (shard,) = (own_cache / "tokens").rglob("*train*.bin")
                (tmp_path / "kept").write_bytes(shard.read_bytes())
                os.truncate(shard, 1024)

        return barellm.train("gpt2-124m", out=folder, callbacks=[callback], quiet=True, **more)

    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(3000)))
    tiny = TINY | {"data": {"source": str(tmp_path / "text.txt"), "tokenizer": "bytes"}}
    whole = run(tmp_path / "whole", **tiny)
    with pytest.raises(mapping.LostFile, match=r"train.*\.bin was cut short"):
        run(tmp_path / "run", cut_after=3, **tiny)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000003"]
    (shard,) = (own_cache / "tokens").rglob("*train*.bin")
    os.replace(tmp_path / "kept", shard)
    resumed = run(tmp_path / "run", resume=True)
    assert resumed.finished and resumed.losses == whole.losses
    name = "checkpoints/step-000006/weights.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
