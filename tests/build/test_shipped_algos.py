"""The table of shipped cuBLASLt algorithms: what goes into it, and that the one in the tree is well formed."""

import re

import pytest

from tools import shipped_algos

KEY = "00000000000000480000000000000400" + "0" * 16 * 4 + "0024004888880000"
ALGO = "0000008700000042" + "0" * 16 * 7


def entry(first="10.00", best="9.00", key=KEY, algo=ALGO, **changes):
    fields = {"problem": "bfloat16:72x1024x8:tn:bias", "device": "NVIDIA_H200-9.0", "cublaslt": "130100"}
    return fields | {"first_us": first, "best_us": best, "key": key, "algo": algo} | changes


OTHER_KEY = KEY[:-1] + "1"


@pytest.mark.parametrize(
    ("runs", "count"),
    [
        ([[entry()]], 1),
        ([[entry(best="9.80")]], 0),  # not worth it
        ([[entry()], [entry(best="9.80")]], 0),  # not in every run
        ([[entry()], [entry(algo=ALGO[:-1] + "1")]], 0),  # the runs do not agree
        ([[entry()], [entry(), entry(key=OTHER_KEY)]], 2),
        ([[entry(), entry(cublaslt="130200")]], 2),
    ],
)
def test_what_is_shipped(runs, count):
    assert len(shipped_algos.chosen(runs, gain=0.03)) == count


def test_words_of_a_row():
    text = shipped_algos.header([entry()])
    assert '{"NVIDIA_H200-9.0", 130100, {0x48, 0x400, 0x0, 0x0, 0x0, 0x0, 0x24004888880000}, {{0x8700000042' in text


def test_the_table_in_the_tree():
    rows = re.findall(
        r'^ +\{"([^"]+)", (\d+), \{([^}]+)\}, \{\{([^}]+)\}\}\},$', shipped_algos.HEADER.read_text(), re.M
    )
    assert rows and len(rows) == shipped_algos.HEADER.read_text().count(" us\n")
    keys = [row[:3] for row in rows]
    assert len(set(keys)) == len(keys)
    for _, _, key, algo in rows:
        assert len(key.split(", ")) == 7 and len(algo.split(", ")) == 8
