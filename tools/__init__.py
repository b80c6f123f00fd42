"""Makes data and pages of this repository: the demo model, generated docs. In no wheel."""
