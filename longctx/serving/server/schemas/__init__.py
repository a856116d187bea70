"""What clients send (pydantic, checked) and get (msgspec, written fast)."""
