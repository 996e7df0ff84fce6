"""One file per structure: its parts, its shapes, which engine answers for it."""
