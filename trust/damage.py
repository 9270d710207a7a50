"""Seeds for the fuzzer, from the package's own files and tests, and random damage to them.

Damage knows the formats: lines, numbers, words and values of YAML are changed as such, and also single bytes.
"""

import ast
import re

from .reporting import TOP

MOST = 64 << 10  # bytes of one input


def _words(text):
    return text.split()


_NUMBERS = _words("""
0 1 -1 2 7 16 255 65536 1e9 12e9 1e400 -0.0 nan .nan .inf -.inf 1_000 0x10 0o7 1:30 99999999999999999999 1e-400
² ٣ 1.5 true null ~ 2026-13-45 12345678901234567890123456789012345678901234567890
""")
_WORDS = _words("""
GPU0 GPU1 GPU99 NIC0 mlx5_0 X NV1 NV18 NV99 SYS NODE PHB PXB PIX matrix: name: gpu: speeds: links: hosts: groups:
devices_per_host: timeout: algorithm: topology: mains: strategy: devices: update: float32 yes scalar
&a *a <<: !!binary !!set !!omap !!timestamp !!python/object/apply:os.system !!float !!int |2 >- --- ... ? - : # %
hierarchical tree flat auto dgx-1v 127.0.0.1:2222 [::1]:1 {} [] '' ""
""")
_VALUES = (
    *_NUMBERS,
    "[[0, 1], [2, 3]]",
    "[]",
    "{}",
    "{a: {b: [1, {c: 2}]}}",
    "[&x [*x]]",
    "!!binary aGk=",
    "'text'",
    '"\\0"',
    "|2\n    X",
    "[true, null, 1.5, [], {}]",
    "{? [1, 2] : 3}",
    "../../etc/passwd",
    "/dev/null",
    "9" * 5000,
    "0x" + "f" * 5000,
)
_ODD_BYTES = (b"\0", b"\xff", b"\t", b"\r", b"\n", b"\x1b[31m", b"\xe2\x80\x8b", b"\xef\xbb\xbf", b"\xed\xa0\x80", b" ")
_NUMBER = re.compile(rb"[-+]?\d[\d.eE+-]*")
_WORD = re.compile(rb"[A-Za-z_][\w./-]*:?")
_VALUE = re.compile(rb"(?m)^(\s*[\w-]+:)[^\n]*")


def seeds():
    """Return the files of ``configs/``, outputs of nvidia-smi, and the texts of several lines in tests, as bytes."""
    files = [*(TOP / "configs").rglob("*.*"), *(TOP / "tests" / "topology" / "nvidia_smi").glob("*.txt")]
    found = [path.read_bytes() for path in sorted(files) if path.suffix in (".yaml", ".tsv", ".txt")]
    for test in sorted((TOP / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(test.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.strip().count("\n"):
                found.append(node.value.encode("utf-8", "surrogatepass"))
    # long tables say no more than their first lines
    return sorted({data[:4096] for data in found})


def damaged(data, rng, others):
    """Return ``data`` with one to six random changes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        data = rng.choice(_DAMAGE)(data, rng, others)[:MOST]
    return data


def _place(data, rng):
    return rng.randint(0, len(data))


def _bytes_changed(data, rng, others):
    at = _place(data, rng)
    new = rng.choice((bytes([rng.randrange(256)]), rng.choice(_ODD_BYTES), b""))
    return data[:at] + new + data[at + rng.choice((0, 1, 1, 8)) :]


def _lines_changed(data, rng, others):
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    how = rng.randrange(5)
    if how == 0:
        del lines[at]
    elif how == 1:
        lines.insert(rng.randint(0, len(lines)), lines[at])
    elif how == 2:
        lines.insert(rng.randint(0, len(lines)), lines.pop(at))
    elif how == 3:
        lines[at:at] = [lines[at]] * rng.choice((3, 30, 300))
    else:
        lines[at] = b" " * rng.randrange(5) + lines[at]
    return b"\n".join(lines)


def _token_changed(pattern, tokens):
    def change(data, rng, others):
        places = list(pattern.finditer(data))
        if not places:
            return data + rng.choice(tokens).encode()
        place = rng.choice(places)
        return data[: place.start()] + rng.choice(tokens).encode() + data[place.end() :]

    return change


def _value_changed(data, rng, others):
    places = list(_VALUE.finditer(data))
    if not places:
        return b"matrix: " + data
    place = rng.choice(places)
    return data[: place.end(1)] + b" " + rng.choice(_VALUES).encode() + data[place.end() :]


def _spliced(data, rng, others):
    other = rng.choice(others)
    return data[: _place(data, rng)] + other[_place(other, rng) :]


def _cut(data, rng, others):
    return data[: _place(data, rng)]


def _encoded(data, rng, others):
    text = data.decode("utf-8", "replace")
    return text.encode(rng.choice(("utf-16", "utf-16-le", "utf-8-sig", "latin-1", "utf-32")), "replace")


def _nested(data, rng, others):
    depth, at = rng.choice((10, 100, 1000, 20000)), _place(data, rng)
    opening, closing = rng.choice(((b"[", b"]"), (b"{a: ", b"}"), (b"- ", b""), (b"!!set {", b"}"), (b"? ", b"")))
    return data[:at] + opening * depth + rng.choice((b"", closing * depth)) + data[at:]


def _laughing(data, rng, others):
    """Insert a billion laughs: aliases of aliases, small as a file and huge when printed."""
    levels = [b"a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 9):
        levels.append(b"a%d: &a%d [%s]" % (level, level, b", ".join([b"*a%d" % (level - 1)] * 9)))
    key = rng.choice((b"groups", b"hosts", b"speeds", b"links", b"matrix", b"devices", b"timeout", b"name"))
    return b"\n".join([*levels, key + b": *a8", data])


def _replaced(data, rng, others):
    table = rng.choice(((b" ", b"\t"), (b"\t", b"  "), (b"\n", b"\r\n"), (b"GPU", b"gpu"), (b":", b" :"), (b"0", b"1")))
    return data.replace(*table)


_DAMAGE = (
    _bytes_changed,
    _bytes_changed,
    _lines_changed,
    _lines_changed,
    _token_changed(_NUMBER, _NUMBERS),
    _token_changed(_WORD, _WORDS),
    _value_changed,
    _value_changed,
    _spliced,
    _cut,
    _encoded,
    _replaced,
) * 8 + (_nested, _laughing)
