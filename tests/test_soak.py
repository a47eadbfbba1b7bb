"""A short form of the soak, and that it sees what it looks for."""

import random
from collections import Counter

import pytest

from fastspec.drafters.base import Batch
from fastspec.engine import speculation
from fastspec.engine.block_manager import BlockManager

from . import soak

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.check
def test_nothing_is_lost_or_changed(tmp_path):
    summary = soak.run(tmp_path, 200, seed=1)
    assert summary["failures"] == []
    assert summary["requests"] >= 200
    for what in ("preempted", "aborted", "refused", "errors heard", "faulty"):
        assert summary[what] > 0, what


def shift_of(folder, name, num_requests=40):
    """What one shift in one world complains about."""
    (setting,) = [setting for setting in soak.WORLDS if setting.name == name]
    failures = []
    soak.World(setting, folder, random.Random(3), failures, Counter()).shift(num_requests)
    return failures


def test_it_sees_a_wrong_text(monkeypatch, tmp_path):
    def without_limits(*args, **fields):
        return Batch(*args, **fields | {"own_limits": None})  # extra tokens depend on the batch

    monkeypatch.setattr(speculation, "Batch", without_limits)
    failures = shift_of(tmp_path, "gemma2")
    assert failures
    assert all("not as alone" in failure for failure in failures)


def test_it_sees_a_lost_block(monkeypatch, tmp_path):
    release = BlockManager.release

    lost = []

    def forgetful(self, request):
        if request.block_table and not lost:
            lost.append(request.block_table.pop())
        release(self, request)

    monkeypatch.setattr(BlockManager, "release", forgetful)
    assert any("blocks" in failure for failure in shift_of(tmp_path, "gemma2", 5))
