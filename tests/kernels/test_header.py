"""csrc/stoker.h is the C interface: what it declares is what the library exports, and what Python binds."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import builds_agree
import pytest

from stoker.kernels import header, native

ROOT = Path(__file__).parent.parent.parent
STOKER_H = ROOT / "csrc" / "stoker.h"


def test_every_exported_function_is_declared_and_every_declared_one_exported() -> None:
    for library in Path(native.library()._name).parent.glob("libstoker-*.so"):
        assert builds_agree.exported(library) == set(header.read(STOKER_H).functions), library.name


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_header_is_plain_c_and_its_structs_have_the_layout_that_python_gives_them(tmp_path: Path) -> None:
    structs = header.read(STOKER_H).structs
    expected = {
        f"{name}.{field}": (getattr(kind, field).offset, ctypes.sizeof(type_))
        for name, kind in structs.items()
        for field, type_ in kind._fields_  # type: ignore[misc]
    }
    expected |= {name: (0, ctypes.sizeof(kind)) for name, kind in structs.items()}
    lines = [
        f'printf("{place} %zu %zu\\n", '
        + (f"offsetof({name}, {field}), sizeof((({name}*)0)->{field}));" if field else f"(size_t)0, sizeof({name}));")
        for place in expected
        for name, _, field in [place.partition(".")]
    ]
    source = tmp_path / "layout.c"
    source.write_text(
        '#include "stoker.h"\n#include <stddef.h>\n#include <stdio.h>\n'
        f"int main(void) {{\n{chr(10).join(lines)}\nreturn 0;\n}}\n"
    )
    command = ["cc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I", str(STOKER_H.parent), str(source)]
    subprocess.run([*command, "-o", str(tmp_path / "layout")], check=True)
    answer = subprocess.run([str(tmp_path / "layout")], capture_output=True, text=True, check=True).stdout
    found = {place: (int(offset), int(size)) for place, offset, size in map(str.split, answer.splitlines())}
    assert found == expected


@pytest.mark.parametrize(
    ("text", "line", "quoted"),
    [
        ("int32_t stoker_x(void);", 1, "int32_t stoker_x(void);"),
        ("// one\n/* two\n three */\nSTOKER_API size_t stoker_x(void);", 4, "size_t stoker_x"),
        ("STOKER_API int32_t stoker_x(int32_t);", 1, "int32_t"),
        ("STOKER_API int32_t stoker_x(void x);", 1, "void x"),
        ("\ntypedef struct a { int32_t x; char y; } a;", 2, "char y"),
        ("typedef struct a { int32_t x; } b;", 1, "typedef struct a { int32_t x; } b;"),
        ("enum e { A = 0, B };", 1, "B"),
        ("#define X 1\nunion u { int32_t x; };", 2, "union u { int32_t x; };"),
    ],
)
def test_syntax_that_the_parser_does_not_know_is_reported_with_its_line(
    tmp_path: Path, text: str, line: int, quoted: str
) -> None:
    file = tmp_path / "odd.h"
    file.write_text(text)
    with pytest.raises(header.HeaderError, match=re.escape(f"odd.h:{line}: `{quoted}` is not a declaration")):
        header.read(file)


def test_the_parser_needs_no_torch() -> None:
    code = "import sys, stoker.kernels.header; sys.exit(1 if 'torch' in sys.modules else 0)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_field_that_a_struct_does_not_have_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'colums'"):
        native.struct("stoker_layer_norm_call")(colums=3)


def test_a_function_that_the_header_does_not_declare_is_reported_as_a_version_mismatch() -> None:
    with pytest.raises(native.NativeLibraryError, match=r"stoker\.h does not declare stoker_nothing.*reinstall Stoker"):
        native.call("stoker_nothing")


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library and its header in a folder of their own, from which `native.library.__wrapped__()` loads."""
    library = Path(native.library()._name)
    for file in (library, library.with_name("stoker.h")):
        shutil.copy(file, tmp_path)
    monkeypatch.setenv("STOKER_NATIVE_DIR", str(tmp_path))
    monkeypatch.setattr(native, "header", functools.cache(native.header.__wrapped__))
    return tmp_path


def test_a_copy_of_library_and_header_loads(copied: Path) -> None:
    assert Path(native.library.__wrapped__()._name).parent == copied


def test_a_library_that_was_built_from_another_header_is_refused(copied: Path) -> None:
    with open(copied / "stoker.h", "a") as file:
        file.write("// a later version\n")
    with pytest.raises(
        native.NativeLibraryError, match=r"was built from another version of stoker\.h.*reinstall Stoker$"
    ):
        native.library.__wrapped__()


def test_a_library_without_a_header_is_refused(copied: Path) -> None:
    (copied / "stoker.h").unlink()
    with pytest.raises(native.NativeLibraryError, match=r"header cannot be read: .*stoker\.h.*reinstall Stoker$"):
        native.library.__wrapped__()
