"""Loads a dataflow from a Python file, by ``FILE.py:NAME``.

Workers cannot import the file, so its functions must be pickled by value. cloudpickle does that for
modules that are not in ``sys.modules``: the file runs as a module that is there only while it runs.
Modules that it imports from its own folder are registered to be pickled by value, too.
"""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import cloudpickle

from roost.dataflow.flow import Dataflow
from roost.errors import ConfigError
from roost.model.settings import DataflowSettings

KEY = "dataflow.flow"


def load_flow(text: str) -> Dataflow:
    """Run a Python file and return the dataflow that it defines under a name.

    Raises :class:`ConfigError` if there is no such file or name, or the file raises an exception.
    """
    file, _, name = str(DataflowSettings(flow=text).flow).rpartition(":")
    path = Path(file).absolute()
    try:
        code = compile(path.read_bytes(), str(path), "exec")
    except OSError as error:
        raise ConfigError(KEY, text, f"a readable file ({error.strerror})") from None
    except (SyntaxError, ValueError) as error:
        line = f"line {error.lineno}: " if isinstance(error, SyntaxError) else ""
        raise ConfigError(KEY, text, f"valid Python ({line}{error.args[0]})") from None
    module = ModuleType(f"roost_flow_{path.stem}")
    module.__file__ = str(path)
    with _importable(module, path.parent):
        try:
            exec(code, module.__dict__)
        except Exception as error:
            problem = "".join(traceback.format_exception_only(error)).strip()
            expected = f"a file that runs without an exception (line {_line(error, path)}: "
            raise ConfigError(KEY, text, f"{expected}{problem})") from error
    return _named(module, name, text)


@contextmanager
def _importable(module: ModuleType, folder: Path) -> Iterator[None]:
    """Have a module, and the modules of its folder, found by imports while it runs."""
    known = set(sys.modules)
    sys.modules[module.__name__] = module  # dataclasses look up the module of a class
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(module.__name__, None)
        for name in set(sys.modules) - known:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and folder in Path(file).parents:
                cloudpickle.register_pickle_by_value(sys.modules[name])


def _line(error: Exception, path: Path) -> int | None:
    """Return the last line of a file that an exception passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno for f in reversed(frames) if f.filename == str(path)), None)


def _named(module: ModuleType, name: str, text: str) -> Dataflow:
    flows = sorted(key for key, value in vars(module).items() if isinstance(value, Dataflow))
    found = vars(module).get(name)
    if isinstance(found, Dataflow):
        return found
    known = f"the file has {', '.join(flows)}" if flows else "the file has none"
    near = difflib.get_close_matches(name, flows, 1)
    if near:
        known += f"; did you mean {near[0]}?"
    if name in vars(module):
        known = f"{name} is of type {type(found).__name__}; {known}"
    raise ConfigError(KEY, text, f"the name of a Dataflow ({known})")
