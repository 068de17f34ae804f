"""install and uninstall: which object stands where, and what is refused."""

import re
import sys
from importlib import metadata
from types import ModuleType

import pytest

pytest.importorskip("torch", reason="the extra `torch` is not installed")

import torch_bridge
from torch_bridge import clients


@pytest.fixture
def library(monkeypatch):
    """verl 0.9.7 as far as `install` sees it: the home of its function, and a module that has imported it."""
    patch_point = clients.verl.PATCH_POINT
    home, importer = ModuleType("home"), ModuleType("importer")
    home.linear_cross_entropy = importer.linear_cross_entropy = object()
    monkeypatch.setitem(sys.modules, patch_point.module, home)
    monkeypatch.setitem(sys.modules, patch_point.importers[0], importer)
    monkeypatch.setattr(metadata, "version", lambda name: "0.9.7")
    yield home, importer
    torch_bridge.uninstall("verl")


def test_uninstall_restores_the_object(library):
    home, importer = library
    original = home.linear_cross_entropy
    torch_bridge.install("verl")
    assert home.linear_cross_entropy is importer.linear_cross_entropy is not original
    torch_bridge.install("verl", implementation="xla")
    torch_bridge.uninstall("verl")
    assert home.linear_cross_entropy is importer.linear_cross_entropy is original
    torch_bridge.uninstall("verl")
    assert home.linear_cross_entropy is original


def test_an_earlier_patch_of_someone_else_is_restored(library):
    home, importer = library
    original, importer.linear_cross_entropy = home.linear_cross_entropy, object()
    theirs = importer.linear_cross_entropy
    torch_bridge.install("verl")
    assert home.linear_cross_entropy is importer.linear_cross_entropy
    torch_bridge.install("verl", implementation="xla")
    torch_bridge.uninstall("verl")
    assert home.linear_cross_entropy is original and importer.linear_cross_entropy is theirs


def test_the_log_says_that_the_bridge_is_installed(library, caplog):
    caplog.set_level("INFO", logger="rlk_jax")
    torch_bridge.install("verl")
    assert [x.getMessage() for x in caplog.records] == ["torch_bridge: verl 0.9.7 computes log-probs with linear_logp"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"implementation": "bogus"}, "implementation must be "),
        ({"implementation": "mosaic"}, "linear_logp cannot run 'mosaic' here: "),
        ({"memory_budget": 0}, "memory_budget must be a positive number of bytes, such as 2**30, got 0."),
        ({"memory_budget": "x"}, "memory_budget must be a positive number of bytes, such as 2**30, got 'x'."),
    ],
)
def test_wrong_options_are_refused(library, wrong, message):
    home, _ = library
    original = home.linear_cross_entropy
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        torch_bridge.install("verl", **wrong)
    assert home.linear_cross_entropy is original


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("function", [torch_bridge.install, torch_bridge.uninstall])
def test_a_later_patch_of_someone_else_is_kept(library, function, place):
    home = library[place]
    torch_bridge.install("verl")
    ours, home.linear_cross_entropy = home.linear_cross_entropy, object()
    theirs = home.linear_cross_entropy
    message = r"linear_cross_entropy is not the object that torch_bridge installed: what has replaced it must be"
    with pytest.raises(RuntimeError, match=message):
        function("verl")
    assert home.linear_cross_entropy is theirs
    home.linear_cross_entropy = ours


def test_a_module_imported_in_between_is_restored_too(library):
    home, importer = library
    del sys.modules[clients.verl.PATCH_POINT.importers[0]]
    original = home.linear_cross_entropy
    torch_bridge.install("verl")
    importer.linear_cross_entropy = home.linear_cross_entropy
    sys.modules[clients.verl.PATCH_POINT.importers[0]] = importer
    torch_bridge.uninstall("verl")
    assert importer.linear_cross_entropy is original


@pytest.mark.parametrize("version", ["1.15.3", "1.17.0", "2.0"])
def test_unknown_versions_are_refused(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    message = (
        f"torch_bridge knows trl 1.16, found {version}: nothing was changed. To install what it knows: pip install"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}"):
        torch_bridge.install("trl")


@pytest.mark.parametrize(
    ("name", "known", "command"),
    [("trl", "1.16", 'pip install "rlk-jax[clients]"'), ("verl", "0.9", 'pip install "verl==0.9.*"')],
)
def test_a_library_that_is_missing_is_refused_with_the_command_that_installs_it(name, known, command, monkeypatch):
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", version)
    said = f"torch_bridge knows {name} {known}, found none installed: nothing was changed. "
    with pytest.raises(RuntimeError, match=f"^{re.escape(f'{said}To install what it knows: {command}')}$"):
        torch_bridge.install(name)


@pytest.mark.parametrize("function", [torch_bridge.install, torch_bridge.uninstall])
@pytest.mark.parametrize("name", ["nemo", ["trl"]])
def test_unknown_clients_are_refused(function, name):
    with pytest.raises(ValueError, match=rf"^name must be one of 'trl', 'verl', got {re.escape(repr(name))}.$"):
        function(name)
