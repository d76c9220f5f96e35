"""Writes what is made from the types: the JSON Schema, the TypeScript declarations, the tables of the documents."""
