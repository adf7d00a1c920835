"""Problems: the objectives that are minimised, and their oracles."""
