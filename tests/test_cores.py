"""axo.cores: affinity and quota, as the kernel writes them."""

import os

import pytest

from axo import cores

QUOTA, PERIOD = "cpu/a/cpu.cfs_quota_us", "cpu/a/cpu.cfs_period_us"


def tree(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/job/step\n", {"job/step/cpu.max": "max 100000\n", "job/cpu.max": "100000 100000\n"}, 1),
        ("0::/job/step\n", {"job/step/cpu.max": "150000 100000\n", "job/cpu.max": "400000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {}, 1 << 30),
        (
            "4:memory:/a\n3:cpu,cpuacct:/a\n",
            {QUOTA: "300000", PERIOD: "100000"},
            3,
        ),
        ("3:cpu,cpuacct:/a\n", {QUOTA: "-1", PERIOD: "100000"}, 1 << 30),
    ],
    ids=["parent", "own", "root", "none", "version-1", "version-1-none"],
)
def test_quotas(tmp_path, own, files, expected):
    tree(tmp_path / "groups", files)
    (tmp_path / "own").write_text(own)
    assert cores._quota(tmp_path / "groups", tmp_path / "own") == expected


def test_the_smaller_counts(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for quota, expected in ((1 << 30, 8), (3, 3), (16, 8)):
        monkeypatch.setattr(cores, "_quota", lambda quota=quota: quota)
        assert cores.usable_cores() == expected
