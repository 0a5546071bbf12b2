"""Charts of equal content are validated once: validation takes more than half of the time of a report."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _equal_charts_are_validated_once() -> Iterator[None]:
    from altair.utils import schemapi

    find_errors, valid = schemapi._get_errors_from_spec, set[str]()

    def find_errors_once(spec, schema, rootschema=None):
        text = json.dumps([spec, schema])
        errors = [] if text in valid else find_errors(spec, schema, rootschema=rootschema)
        if not errors:
            valid.add(text)
        return errors

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schemapi, "_get_errors_from_spec", find_errors_once)
        yield
