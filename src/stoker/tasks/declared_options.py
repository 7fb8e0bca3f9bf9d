"""Reads dataclasses of options from source files, without importing the modules that contain them.

`TrainingArguments` of transformers and what is derived from it take seconds to import, because they need torch. Their fields do
not: this module parses the files, and executes only the class declarations that are asked for, with the names that these use.
What cannot be had that way raises `Undeclared`, or makes one field `Undeclared`; the callers then leave it to the real classes.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from dataclasses import field, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

__all__ = ["Undeclared", "declared", "undeclared_fields"]

_UNKNOWN = "undeclared"
"""In the metadata of fields whose type or default is not known."""


class Undeclared(Exception):
    """A name cannot be had without importing its module."""


def declared(module: str, name: str) -> Any:
    """The class or value that is bound to `name` at the top of a module."""
    return _source(module).value(name)


def undeclared_fields(kind: Any) -> list[str]:
    """The options of a dataclass whose type is not known."""
    return [name for name, one in kind.__dataclass_fields__.items() if one.metadata.get(_UNKNOWN)]


_SOURCES: dict[str, _Source] = {}
_MADE: set[type] = set()
"""The classes that were made here, without their methods."""


def _source(module: str) -> _Source:
    if module not in _SOURCES:
        _SOURCES[module] = _Source(module, _file_of(module))
    return _SOURCES[module]


def _file_of(module: str) -> Path:
    """The source file of a module. Only packages at the top are looked up by Python; nothing is imported."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        raise Undeclared(module)
    for place in spec.submodule_search_locations:
        path = Path(place).joinpath(*rest)
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file.is_file():
                return file
    raise Undeclared(module)


class _Package:
    """Stands for a module that a source file imports by its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return declared(self._name, name)


class _Source:
    """A module of which statements are executed as their names are needed."""

    def __init__(self, module: str, file: Path) -> None:
        self.module = module
        self._package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        self._globals: dict[str, Any] = {"__name__": module}
        self._statements: dict[str, list[ast.stmt]] = {}
        self._busy: set[str] = set()
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, ValueError, SyntaxError, RecursionError):
            raise Undeclared(module) from None
        for statement in _flat(tree.body):
            for name in _bound(statement):
                self._statements.setdefault(name, []).append(statement)

    def value(self, name: str) -> Any:
        if name not in self._globals:
            if name in self._busy or name not in self._statements:
                raise Undeclared(f"{self.module}.{name}")
            self._busy.add(name)
            try:
                self._globals[name] = self._bind(name)
            finally:
                self._busy.discard(name)
        return self._globals[name]

    def _bind(self, name: str) -> Any:
        """The last statement that can be executed decides: the branches of `if` and `try` bind the same name."""
        for statement in reversed(self._statements[name]):
            try:
                return self._execute(statement, name)
            except Exception:  # whatever the code of others raises
                continue
        raise Undeclared(f"{self.module}.{name}")

    def _execute(self, statement: ast.stmt, name: str) -> Any:
        if isinstance(statement, ast.ImportFrom):
            found = next(one for one in statement.names if (one.asname or one.name) == name)
            return self._imported(statement, found.name)
        if isinstance(statement, ast.Import):
            whole = next(one for one in statement.names if (one.asname or one.name.partition(".")[0]) == name)
            return _module(whole.name if whole.asname else whole.name.partition(".")[0])
        if isinstance(statement, ast.ClassDef):
            return self._class(statement)
        if isinstance(statement, ast.FunctionDef):
            statement = _without_annotations(statement)
        elif isinstance(statement, ast.AnnAssign):
            assert statement.value is not None
            return self._evaluated(statement.value)
        return self._run(statement)[name]

    def _imported(self, statement: ast.ImportFrom, name: str) -> Any:
        module = statement.module or ""
        if statement.level:
            module = importlib.util.resolve_name("." * statement.level + module, self._package)
        if _is_standard(module):
            return getattr(importlib.import_module(module), name)
        try:
            return declared(module, name)
        except Undeclared:
            return _module(f"{module}.{name}")

    def _class(self, node: ast.ClassDef) -> type:
        """The class with its fields and values, without its methods."""
        bases = self._evaluated(ast.Tuple([*node.bases], ast.Load()))
        keywords = {one.arg: self._evaluated(one.value) for one in node.keywords if one.arg}
        decorators = [one for one in node.decorator_list if _name(one).endswith("dataclass")]
        for_fields = bool(decorators) or any(map(is_dataclass, bases))

        def fill(namespace: dict[str, Any]) -> None:
            annotations: dict[str, Any] = {}
            namespace |= {"__module__": self.module, "__annotations__": annotations}
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    self._field(statement, statement.target.id, namespace, annotations)
                elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                    try:
                        namespace[statement.targets[0].id] = self._evaluated(statement.value, namespace)
                    except Exception:
                        if not for_fields:
                            raise

        made = types.new_class(node.name, bases, keywords, lambda namespace: fill(namespace))
        for decorator in decorators:
            made = self._evaluated(decorator)(made)
        _MADE.add(made)
        return made

    def _field(self, node: ast.AnnAssign, name: str, namespace: dict[str, Any], annotations: dict[str, Any]) -> None:
        try:
            annotation = self._annotation(node.annotation)
            if _mentions_incomplete(annotation):
                raise Undeclared(name)
            value = self._evaluated(node.value, namespace) if node.value is not None else None
        except Exception:  # whatever the code of others raises
            annotation, value = Any, field(default=None, init=False, metadata={_UNKNOWN: True})
        annotations[name] = annotation
        if value is not None or node.value is not None:
            namespace[name] = value

    def _annotation(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        return self._evaluated(node)

    def _evaluated(self, node: ast.expr, local: dict[str, Any] | None = None) -> Any:
        self._provide(node, local or {})
        expression = ast.fix_missing_locations(ast.Expression(node))
        code = compile(expression, self.module, "eval", dont_inherit=True)
        return eval(code, self._globals, local)  # what the import of the module would execute

    def _run(self, statement: ast.stmt) -> dict[str, Any]:
        self._provide(statement, {})
        tree = ast.fix_missing_locations(ast.Module([statement], []))
        exec(compile(tree, self.module, "exec", dont_inherit=True), self._globals)  # as above
        return self._globals

    def _provide(self, node: ast.AST, local: dict[str, Any]) -> None:
        """Binds the names of the module that a piece of code uses. Missing ones are noticed if they are really used."""
        for name in {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} - local.keys():
            if name in self._statements and name not in self._globals:
                try:
                    self.value(name)
                except Undeclared:
                    continue


def _mentions_incomplete(annotation: Any) -> bool:
    """Whether a type is a class without its methods, or contains one: it would not convert words as the real class does."""
    incomplete = isinstance(annotation, type) and annotation in _MADE and not issubclass(annotation, Enum)
    return incomplete or any(map(_mentions_incomplete, getattr(annotation, "__args__", ())))


def _module(name: str) -> Any:
    if _is_standard(name):
        return importlib.import_module(name)
    _file_of(name)
    return _Package(name)


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, and those inside its `if` and `try`."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _flat([*statement.orelse, *statement.body])
        elif isinstance(statement, ast.Try):
            handlers = [one for handler in statement.handlers for one in handler.body]
            yield from _flat([*handlers, *statement.body, *statement.orelse])
        else:
            yield statement


def _bound(statement: ast.stmt) -> list[str]:
    """The names that a statement binds."""
    if isinstance(statement, ast.ImportFrom):
        return [one.asname or one.name for one in statement.names]
    if isinstance(statement, ast.Import):
        return [one.asname or one.name.partition(".")[0] for one in statement.names]
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        return [statement.name]
    if isinstance(statement, ast.Assign):
        return [one.id for target in statement.targets for one in ast.walk(target) if isinstance(one, ast.Name)]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None:
        return [statement.target.id]
    return []


def _name(decorator: ast.expr) -> str:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def _without_annotations(node: ast.FunctionDef) -> ast.FunctionDef:
    """A function as it runs: its annotations and decorators may need more than its result does."""
    node.decorator_list, node.returns = [], None
    for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg):
        if one is not None:
            one.annotation = None
    return node
