"""Parse a recorded name, so that the families do not depend on the tool that wrote it.

The same kernel appears in four spellings: Kineto's (`foo<4, float>(int)`), Nsight's (`foo<(int)4, float>(T1)`), the
linker's (`_Z3fooILi4EfEvi`) and a bare `foo`. They all become one `Anatomy`: scope, base name, template arguments.

Mangled names are only partly demangled. Identifiers have their length, literals and built-in types are one letter each,
and the families need no more; substitutions (`S1_`) and template parameters (`T0_`) are skipped. Only the first
`LOOKED_AT` characters are read, in linear passes. CUTLASS 3 and CK write names of several thousand characters, with
what matters at the front.
"""

import re

import msgspec

LOOKED_AT = 4000
# Length of a base name: the time of patterns with several wildcards grows faster than the length.
LONGEST_BASE = 400

_CONTROL = re.compile(r"[^\x20-\x7e]+")
_ANONYMOUS = re.compile(r"\(anonymous namespace\)::|<unnamed>::|\{anonymous\}::|_GLOBAL__N_\w*::|_INTERNAL_\w*::")
_NSIGHT_LITERAL = re.compile(r"\((?:unsigned )?(?:int|long|short|char|long long)\)(?=-?\d)")
_NSIGHT_BOOL = re.compile(r"\(bool\)([01])")
_LITERAL_SUFFIX = re.compile(r"\b(\d+)(?:ull|ul|u|l)\b")
_CLONE = re.compile(r"(?: \[clone [^\]]{0,40}\]|\.kd)$")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_INTEGER = re.compile(r"(?<![\w.])-?\d+(?!\w)", re.ASCII)

_BRACKET = re.compile(r"<|(?<!-)>|\(|\)")

_MANGLED = re.compile(
    r"(?P<literal>L(?P<kind>[a-z])(?P<value>n?\d+)E)"
    r"|(?P<enum>L(?=N))"
    r"|(?P<enum_value>E(?P<number>\d+)E)"
    r"|(?P<reference>S[0-9A-Z]*_|T\d*_)"
    r"|(?P<half>DF16b|DF16_|Dh)"
    r"|(?P<skip>St|Sa|Ss|cl|NK|Ul|_Z)"
    r"|(?P<length>\d+)"
    r"|(?P<letter>.)"
)
_LETTERS = {
    "f": "float",
    "d": "double",
    "l": "long",
    "x": "long",
    "m": "unsigned long",
    "i": "int",
    "j": "unsigned int",
    "b": "bool",
    "h": "unsigned char",
    "a": "signed char",
    "t": "ushort",
    "s": "short",
    "c": "char",
}
_HALVES = {"DF16b": "__bf16", "DF16_": "_Float16", "Dh": "_Float16"}


class Anatomy(msgspec.Struct, frozen=True, kw_only=True):
    """`void at::native::foo<4, Bar<float> >(int)` has scope `at::native`, base `foo`, template `4, Bar<float>`."""

    name: str
    text: str  # the part that is read, in one spelling
    scope: str
    base: str
    template: str
    arguments: str
    mangled: bool

    @property
    def qualified(self) -> str:
        return f"{self.scope}::{self.base}" if self.scope else self.base

    @property
    def body(self) -> str:
        """The name and its template arguments."""
        return f"{self.qualified}<{self.template}>" if self.template else self.qualified

    def words(self) -> list[str]:
        """The identifiers of the template arguments, in order."""
        return _IDENTIFIER.findall(self.template)

    def integers(self) -> list[int]:
        """The integers among the template arguments, in order."""
        return [int(number) for number in _INTEGER.findall(self.template) if len(number) < 12]


def dissect(name: str) -> Anatomy:
    """Never raises: text that is not a kernel name becomes a base name."""
    text = _CLONE.sub("", _CONTROL.sub(" ", name[:LOOKED_AT]).strip())
    if text.startswith("_Z"):
        return _dissect_mangled(name, text)
    return _dissect_readable(name, text)


def _dissect_readable(name: str, text: str) -> Anatomy:
    text = _ANONYMOUS.sub("", text)
    text = _NSIGHT_LITERAL.sub("", text)
    text = _NSIGHT_BOOL.sub(lambda match: "true" if match[1] == "1" else "false", text)
    text = _LITERAL_SUFFIX.sub(r"\1", text)
    head, template, arguments = _split(text.removeprefix("void "))
    head = head.rsplit(" ", 1)[-1] if template or arguments else head
    scope, _, base = head.rpartition("::")
    base = base[:LONGEST_BASE]
    return Anatomy(name=name, text=text, scope=scope, base=base, template=template, arguments=arguments, mangled=False)


def _split(text: str) -> tuple[str, str, str]:
    """Head, template arguments and call arguments.

    The last group of `<...>` before the first `(` outside all brackets belongs to the function; earlier
    ones belong to its return type (`std::enable_if<!(false), void>::type f<int>(...)`) or its scope. Inside
    parentheses, `<` and `>` may be comparisons (`std::enable_if<((8) > (0)), void>`).
    """
    depth = parentheses = 0
    opened = start = end = -1
    for bracket in _BRACKET.finditer(text):
        index = bracket.start()
        match bracket[0]:
            case "(" if depth:
                parentheses += 1
            case ")":
                parentheses = max(0, parentheses - 1)
            case _ if parentheses:
                pass
            case "<":
                opened = index if depth == 0 else opened
                depth += 1
            case ">" if depth:
                depth -= 1
                if depth == 0:
                    start, end = opened, index
            case "(":
                return *_cut(text[:index], start, end), text[index + 1 :]
    if depth:  # truncated inside the template arguments
        return text[:opened], text[opened + 1 :], ""
    return *_cut(text, start, end), ""


def _cut(text: str, start: int, end: int) -> tuple[str, str]:
    """Return head and template arguments, if the last group of brackets is at the very end."""
    if start >= 0 and end == len(text) - 1:
        return text[:start], text[start + 1 : end].strip()
    return text, ""


def _dissect_mangled(name: str, text: str) -> Anatomy:
    path, tokens = _read_mangled(text)
    spelled = [word for word in path if not word.startswith(("_GLOBAL__N", "_INTERNAL_"))]
    base = (spelled[-1] if spelled else text)[:LONGEST_BASE]
    scope = "::".join(spelled[:-1])
    template = ", ".join(tokens)
    body = f"{scope}::{base}" if scope else base
    return Anatomy(
        name=name,
        text=f"{body}<{template}>" if template else body,
        scope=scope,
        base=base,
        template=template,
        arguments="",
        mangled=True,
    )


def _read_mangled(text: str) -> tuple[list[str], list[str]]:
    """Return the function's qualified name, then everything after it as a flat list of names, types and literals."""
    path: list[str] = []
    tokens: list[str] = []
    inside = in_enum = False  # past the path; between an enumeration's name and its value
    nested = text.startswith("_ZN")
    position = 0
    while match := _MANGLED.match(text, position):
        position = match.end()
        kind = match.lastgroup
        if kind == "length":
            size = int(match["length"][:5])
            word = text[position : position + size]
            if _IDENTIFIER.fullmatch(word) and len(word) == size:
                position += size
                (tokens if inside else path).append(word)
                inside = inside or not nested
        elif match["literal"]:
            tokens.append(_spell_literal(match["kind"], match["value"]))
        elif match["enum"]:
            in_enum = True
        elif match["enum_value"]:
            if in_enum:
                tokens.append(match["number"])
            else:  # the digits are the length of the next name
                position = match.start() + 1
            in_enum = False
        elif match["half"]:
            tokens.append(_HALVES[match["half"]])
        elif match["letter"] in ("I", "E") and path:
            inside = True
        elif inside and match["letter"] in _LETTERS:
            tokens.append(_LETTERS[match["letter"]])
    return path, tokens


def _spell_literal(kind: str, value: str) -> str:
    if kind == "b":
        return "true" if value == "1" else "false"
    return value.replace("n", "-")
