"""Recipes as JSON values for :mod:`.cache`, checked like a user's input when they come back."""

from __future__ import annotations

import math
from typing import Any, Dict, Tuple

from ..topology import Topology
from .cache import as_tuples
from .lanes import Lanes
from .plan import verify
from .recipes import Recipe


def recipe_to_values(recipe: Recipe) -> Dict[str, Any]:
    """Return a recipe as JSON values."""
    return {**vars(recipe), "lanes": vars(recipe.lanes)}


def recipe_from_values(values: Any, topology: Topology) -> Recipe:
    """Return the recipe that :func:`recipe_to_values` was given.

    Raises:
        ValueError, TypeError, KeyError, IndexError: the values are not those of a recipe for ``topology``, or its plan
            does not give every tower every contribution exactly once.
    """
    fields = {name: as_tuples(value) for name, value in values.items()}
    if "lanes" in fields:
        fields["lanes"] = Lanes(**{name: as_tuples(value) for name, value in values["lanes"].items()})
    recipe = Recipe(**fields)
    fractions = recipe.fractions
    fits = recipe.devices == len(topology) and len(fractions) == len(recipe.halves)
    if not fits or min(fractions) < 0 or not math.isclose(sum(fractions), 1.0, rel_tol=1e-6):
        raise ValueError("not a recipe for this machine")
    if verify(recipe.plan()).towers != len(topology):
        raise ValueError("a plan for another number of towers")
    return recipe


def recipes_to_values(recipes: Dict[str, Recipe]) -> Dict[str, Any]:
    """Return recipes by name as JSON values."""
    return {name: recipe_to_values(recipe) for name, recipe in recipes.items()}


def recipes_from_values(values: Any, topology: Topology) -> Dict[str, Recipe]:
    """Return recipes by name; raise as :func:`recipe_from_values`."""
    return {str(name): recipe_from_values(recipe, topology) for name, recipe in values.items()}


Found = Tuple[Tuple[Recipe, ...], Dict[str, Recipe]]  # the best recipes, and the fastest of each baseline


def found_to_values(found: Found) -> Any:
    """Return the result of a search as JSON values."""
    best, known = found
    return [[recipe_to_values(recipe) for recipe in best], recipes_to_values(known)]


def found_from_values(values: Any, topology: Topology) -> Found:
    """Return the result of a search; raise as :func:`recipe_from_values`."""
    best, known = values
    return tuple(recipe_from_values(recipe, topology) for recipe in best), recipes_from_values(known, topology)
