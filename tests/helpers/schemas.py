"""Random JSON schemas with bounded answers, so that a model that talks rubbish comes to an end."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

Schema = dict[str, Any]

NAMES = ("a", "b_1", "c d", "ünï", 'q"uote')
PATTERNS = ("^[a-z]{1,8}$", "^[A-Z][a-z]{0,5}( [0-9]{1,3})?$", "^(on|off|auto)$", r"^\d{2}:\d{2}$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")

scalars = st.one_of(st.none(), st.booleans(), st.integers(-99, 99), st.text('ab ü"\\\n😀', max_size=6))
leaves = st.one_of(
    st.sampled_from(["null", "boolean", ["null", "boolean"]]).map(lambda kind: {"type": kind}),
    st.builds(
        lambda least, most: {"type": "string", "minLength": least, "maxLength": most},
        st.integers(0, 4),
        st.integers(4, 12),
    ),
    st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
    st.sampled_from(FORMATS).map(lambda name: {"type": "string", "format": name}),
    st.builds(
        lambda least, most, every: {"type": "integer", "minimum": least, "maximum": most, **every},
        st.integers(-500, 0),
        st.integers(10, 500),
        st.sampled_from([{}, {"multipleOf": 3}]),
    ),
    st.builds(
        lambda least, below: {"type": "number", "minimum": least, "exclusiveMaximum": below},
        st.integers(-500, 0),
        st.integers(1, 500),
    ),
    scalars.map(lambda value: {"const": value}),
    st.lists(scalars, min_size=1, max_size=4).map(lambda values: {"enum": values}),
)


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=4))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    if draw(st.booleans()):
        return {"type": "array", "prefixItems": draw(st.lists(inner, min_size=1, max_size=3)), "items": False}
    least = draw(st.integers(0, 2))
    made = {
        "type": "array",
        "items": draw(inner),
        "minItems": least,
        "maxItems": least + draw(st.integers(0, 2)),
    }
    return made | ({"uniqueItems": True} if draw(st.integers(0, 7)) == 7 else {})


def containers(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    several = st.lists(inner, min_size=1, max_size=3)
    joined = st.builds(
        lambda word, of: {word: of}, st.sampled_from(["anyOf", "anyOf", "oneOf", "allOf"]), several
    )
    return st.one_of(objects(inner), objects(inner), arrays(inner), joined)


schemas = st.one_of(
    containers(containers(leaves)), containers(leaves), objects(containers(containers(leaves)))
)


def bounded_schemas(count: int) -> list[Schema]:
    """The same ones at each call. Some say what the library does not know."""
    made: list[Schema] = []

    @seed(2026)
    @settings(
        max_examples=4 * count,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(schemas)
    def collect(schema: Schema) -> None:
        if schema not in made:
            made.append(schema)

    collect()
    return made[:: len(made) // count][:count]  # neighbours are alike
