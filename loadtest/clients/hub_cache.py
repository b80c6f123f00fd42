"""A tokenizer folder, laid out as the Hugging Face cache would hold it after a download.

aiperf 0.13 cannot use a folder with traces of ten requests or more: its decoding processes go
offline and then take every name for one of the hub (its pull request 1339). A name that is in the
cache works, with no network. Not here: running it (aiperf.py).
"""

from __future__ import annotations

from pathlib import Path

NAME = "served/tokenizer"
REVISION = "0" * 40  # the cache names a snapshot by its commit


def lay_out(tokenizer: Path, home: Path) -> dict[str, str]:
    """Makes the cache in `home`; the variables under which NAME is `tokenizer`."""
    repository = home / "hub" / f"models--{NAME.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / REVISION).symlink_to(tokenizer.resolve())
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
