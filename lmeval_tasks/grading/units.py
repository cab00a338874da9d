"""Units of measurement: left out of an answer, unless two of them exclude each other."""

from __future__ import annotations

from collections.abc import Set

# Per family its units, each with its names.
_FAMILIES = {
    "angle": ("degree degrees deg", "radian radians rad"),
    "money": ("dollar dollars usd", "cent cents"),
    "length": (
        "mm millimeter millimeters millimetre millimetres",
        "cm centimeter centimeters centimetre centimetres",
        "dm decimeter decimeters",
        "m meter meters metre metres",
        "km kilometer kilometers kilometre kilometres",
        "inch inches in",
        "foot feet ft",
        "yard yards yd",
        "mile miles mi",
    ),
    "time": (
        "s sec second seconds",
        "min minute minutes",
        "h hr hrs hour hours",
        "day days",
        "week weeks",
        "month months",
        "year years yr",
    ),
    "weight": (
        "mg milligram milligrams",
        "g gram grams",
        "kg kilogram kilograms",
        "lb lbs pound pounds",
        "oz ounce ounces",
    ),
    "volume": ("ml milliliter milliliters", "l liter liters litre litres", "gallon gallons gal"),
    "half of the day": ("am", "pm"),
    "direction": ("north", "south", "east", "west"),
}
_UNITS = {
    name.lower(): (family, names.split()[0])
    for family, units in _FAMILIES.items()
    for names in units
    for name in names.split()
}
_COMPOUND = {"mph": ("mile", "hour"), "kmh": ("km", "hour")}
_OTHER = ("sq", "cubic", "square", "squared", "cubed", "unit", "units", "per", "AM", "PM")
# "in", "m" and the like are units only where they are set as text.
KNOWN = frozenset(name for name in (*_UNITS, *_COMPOUND, *_OTHER) if len(name) > 1) - {
    "in",
    "east",
    "west",
    "rad",
    "mi",
}


def opposed(gold: Set[str], answer: Set[str]) -> bool:
    """Whether the words around two quantities name units that exclude each other: cents and dollars, cm and hours.

    Words that are no units, and quantities that have none, exclude nothing.
    """
    units = [_units_in(words) for words in (gold, answer)]
    if not all(units):
        return False
    families = [{family for family, _ in found} for found in units]
    shared = families[0] & families[1]
    return not shared or any(not {unit for unit in units[0] & units[1] if unit[0] == family} for family in shared)


def _units_in(words: Set[str]) -> set[tuple[str, str]]:
    names = [name for word in words for name in _COMPOUND.get(word, (word,))]
    return {_UNITS[name] for name in names if name in _UNITS}
