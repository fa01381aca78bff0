"""The parity check: `ladder.check` climbs it, `rungs` are its steps, `report*` show the result."""
