"""Constraints in the spellings of clients, as `GrammarSpec`s and Lark texts."""
