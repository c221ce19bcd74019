"""The lock of the development environment: what is declared is in it, within its bounds, hashed."""

import re
import runpy
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
LOCK = ROOT / ".ci/requirements.lock"


def locked():
    """Version and number of hashes of each package, by name."""
    entries = re.split(r"\n(?=\S)", LOCK.read_text())
    pairs = [(each.split(" ")[0].partition("=="), each.count("--hash=sha256:")) for each in entries]
    return {canonicalize_name(name): (version, hashes) for (name, _, version), hashes in pairs}


def test_every_package_has_a_hash():
    assert len(found := locked()) > 50
    assert [name for name, (version, hashes) in found.items() if not version or not hashes] == []


def test_what_is_declared_is_locked_within_its_bounds():
    found = locked()
    for text in runpy.run_path(str(ROOT / ".ci/lock"))["wanted"]():
        wanted = Requirement(text)
        version, _ = found[canonicalize_name(wanted.name)]
        assert wanted.specifier.contains(Version(version), prereleases=True), text


def test_torch_and_siblings_are_left_out():
    assert not [name for name in locked() if name == "torch" or name.startswith("kenotron")]


def by_name(text):
    """Find commands of pip that install one of our packages by its name on an index."""
    return re.findall(r"pip\s+install[^\n|`]*[\s'\"]kenotron[\w-]*", text)


def test_nothing_tells_to_install_our_packages_by_name():
    assert by_name("pip install 'kenotron-ckpt[s3]'") and by_name("uv pip install kenotron-tp")
    assert not by_name("pip install ./packages/kenotron-tp") and not by_name("pip install rich")
    files = [f for kind in ("md", "py") for f in ROOT.glob(f"[a-z]*/**/*.{kind}")]
    files += [*ROOT.glob("*.md"), *ROOT.glob(".github/*.md")]
    told = [f for f in files if f.name not in ("test_lock.py", "CHANGELOG.md")]
    assert [str(f) for f in told if by_name(f.read_text(encoding="utf-8"))] == []
