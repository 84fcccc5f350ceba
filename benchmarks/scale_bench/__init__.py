"""Planner, index and store alone at sizes that no model here could fill; see docs/scale.md."""
