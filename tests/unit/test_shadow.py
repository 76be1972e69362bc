"""The shadow mechanism, on small packages built for the purpose and imported for real."""

from __future__ import annotations

import importlib
import inspect
import logging
import pickle
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from flashinfer.elastic import shadow

UPSTREAM = '''
"""Upstream's module."""
import sys
from . import sibling

_private = 1


class Thing:
    def size(self):
        return 1


def make(count, *, scale=2.0):
    """Make things."""
    return [Thing() for _ in range(count)]


def through_the_namespace():
    return make(3)


seen_while_running = sys.modules[__name__].__dict__ is globals()
'''

PATCH = """
from flashinfer.elastic import shadow


def install(module):
    shadow.check_attributes(module, ["Thing", "make"])

    def make(count, *, scale=2.0):
        return "ours"

    shadow.check_parameters(module.make, make, "make")

    class Thing(module.Thing):
        pass

    Thing.__module__, Thing.__qualname__ = module.Thing.__module__, "Thing"
    module.Thing, module.make = Thing, make


def fail_midway(module):
    module.make = None
    module.extra = True
    raise RuntimeError("no such device")
"""


class Site:
    """A directory on ``sys.path`` with a package of upstream's and a shadow in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("host/__init__.py", "")
        self.write("host/sibling.py", "")
        self.write("host/thing.py", UPSTREAM)
        self.write("host_patch.py", PATCH)

    def write(self, path: str, text: str) -> None:
        """Write a file of the site."""
        file = self.root / path
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(textwrap.dedent(text))

    def shadow(self, patch: str = "host_patch:install") -> None:
        """Install the shadow of ``host.thing``."""
        self.write(
            "host/thing/__init__.py",
            f"""
            from flashinfer.elastic import shadow
            shadow.load(__name__, __file__, patch={patch!r})
            """,
        )

    def load(self) -> ModuleType:
        """Import the shadowed module the ordinary way."""
        importlib.invalidate_caches()
        return importlib.import_module("host.thing")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(shadow, "_registry", {})
    yield Site(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0].startswith("host")]:
        del sys.modules[name]


def test_the_module_is_upstreams_own_in_its_own_place(site: Site) -> None:
    site.shadow()
    module = site.load()
    assert module is sys.modules["host.thing"]
    assert module is vars(sys.modules["host"])["thing"]
    assert module.__name__ == "host.thing"
    assert module.__package__ == "host"
    assert module.__doc__ == "Upstream's module."
    assert Path(str(module.__file__)) == site.root / "host" / "thing.py"
    assert not hasattr(module, "__path__")
    assert module.seen_while_running
    assert module._private == 1


def test_the_patch_applies_in_the_one_namespace(site: Site) -> None:
    site.shadow()
    module = site.load()
    assert module.make(1) == "ours"
    assert module.through_the_namespace() == "ours"
    namespace: dict[str, object] = {}
    exec("from host.thing import *\nfrom host.thing import _private", namespace)
    assert namespace["make"] is module.make
    assert namespace["_private"] == 1


def test_monkeypatching_reaches_upstreams_functions(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.shadow()
    module = site.load()
    monkeypatch.setattr("host.thing.make", lambda count: "patched again")
    assert module.through_the_namespace() == "patched again"


def test_pickling_and_inspection_are_as_before(site: Site) -> None:
    site.shadow()
    module = site.load()
    thing = module.Thing()
    assert type(pickle.loads(pickle.dumps(thing))) is module.Thing
    assert inspect.getmodule(module.through_the_namespace) is module
    assert "return make(3)" in inspect.getsource(module.through_the_namespace)


def test_what_was_done_is_recorded(site: Site) -> None:
    site.shadow()
    site.load()
    record = shadow.registry()["host.thing"]
    assert record.patched
    assert record.reason == ""
    assert Path(record.file) == site.root / "host" / "thing.py"


def assert_stepped_aside(site: Site, log: pytest.LogCaptureFixture, reason: str) -> None:
    """Import, and expect upstream whole, one warning, and the reason on record."""
    with log.at_level(logging.WARNING, logger="flashinfer.elastic"):
        module = site.load()
        site.load()
    assert [type(thing) for thing in module.make(2)] == [module.Thing] * 2
    assert not hasattr(module, "extra")
    assert "host_patch" not in vars(module)
    assert len(log.records) == 1
    assert "host.thing is left as FlashInfer ships it" in log.text
    record = shadow.registry()["host.thing"]
    assert not record.patched
    assert reason in record.reason
    assert reason in log.text


def test_a_missing_name_makes_it_step_aside(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.write("host_patch.py", PATCH.replace('["Thing", "make"]', '["Thing", "gone"]'))
    site.shadow()
    assert_stepped_aside(site, caplog, "host.thing has no gone")


@pytest.mark.parametrize(
    "signature",
    [
        "count, *, scale=3.0",
        "count, scale=2.0",
        "count, *, scale=2.0, extra=None",
        "number, *, scale=2.0",
    ],
    ids=["default", "kind", "added", "renamed"],
)
def test_another_signature_makes_it_step_aside(
    site: Site, caplog: pytest.LogCaptureFixture, signature: str
) -> None:
    theirs = UPSTREAM.replace("count, *, scale=2.0", signature).replace("range(count)", "range(2)")
    site.write("host/thing.py", theirs)
    site.shadow()
    assert_stepped_aside(site, caplog, f"make takes ({signature}), expected (count, *, scale=2.0)")


def test_a_patch_that_fails_midway_is_undone(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.shadow("host_patch:fail_midway")
    assert_stepped_aside(site, caplog, "host_patch:fail_midway failed with RuntimeError: no such")


def test_a_patch_that_cannot_be_imported_is_no_error(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.shadow("host_missing:install")
    assert_stepped_aside(site, caplog, "ModuleNotFoundError: No module named 'host_missing'")


def test_without_upstreams_file_the_error_names_the_requirement(site: Site) -> None:
    site.shadow()
    (site.root / "host" / "thing.py").unlink()
    with pytest.raises(ModuleNotFoundError, match="flashinfer-python>=") as caught:
        site.load()
    assert caught.value.name == "host.thing"
    assert "host.thing" not in sys.modules


def test_an_error_of_upstreams_module_is_upstreams(site: Site) -> None:
    site.write("host/thing.py", "raise OSError('no library')")
    site.shadow()
    for _ in range(2):  # As without the shadow, a later import tries again.
        with pytest.raises(OSError, match="no library"):
            site.load()
        assert "host.thing" not in sys.modules
    assert shadow.registry() == {}


def test_other_threads_wait_for_the_patched_module(site: Site) -> None:
    """A thread that imports while the patch runs must not get the unpatched module."""
    site.write(
        "host_patch.py",
        """
        import threading

        patching, importing = threading.Event(), threading.Event()

        def install(module):
            patching.set()
            assert importing.wait(10)
            threading.Event().wait(0.2)
            module.make = "ours"
        """,
    )
    site.shadow()
    importlib.invalidate_caches()
    gate = importlib.import_module("host_patch")
    found = []

    def second() -> None:
        assert gate.patching.wait(10)
        gate.importing.set()
        found.append(importlib.import_module("host.thing").make)

    thread = threading.Thread(target=second)
    thread.start()
    first = site.load()
    thread.join()
    assert shadow.registry()["host.thing"].reason == ""
    assert found == [first.make] == ["ours"]


def test_a_patch_may_import_the_module_it_patches(site: Site) -> None:
    site.write(
        "host_patch.py",
        """
        def install(module):
            from host import thing
            assert thing is module
            thing.make = "ours"
        """,
    )
    site.shadow()
    # While a module runs, its parent does not have it as an attribute yet; sys.modules has.
    assert site.load().make == "ours"


def test_upstream_is_restored_by_removing_the_shadow(site: Site) -> None:
    site.shadow()
    site.load()
    (site.root / "host" / "thing" / "__init__.py").unlink()
    for name in ("host", "host.thing"):
        del sys.modules[name]
    # An empty directory may remain, for the byte code of another interpreter say.
    assert len(site.load().make(2)) == 2


def test_it_imports_nothing_but_the_standard_library() -> None:
    source = Path(str(shadow.__file__)).read_text()
    imported = {
        line.split()[1].partition(".")[0]
        for line in source.splitlines()
        if line.strip().startswith(("import ", "from ")) and "__future__" not in line
    }
    examples = {"flashinfer"}  # in the module's documentation
    assert imported - examples <= sys.stdlib_module_names
