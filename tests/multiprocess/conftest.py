"""One nursery of ranks for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from multiprocess.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Starts and reaps rank processes; see `Ranks`."""
    nursery = Ranks(tmp_path_factory.mktemp("ranks"))
    yield nursery
    nursery.close()
