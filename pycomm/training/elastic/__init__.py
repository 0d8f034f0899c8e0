"""Membership of an elastic group: which ranks remain, which join, and the last step that counts."""
