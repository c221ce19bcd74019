"""Diagnosis of hangs, failures and divergence. Nothing that only trains needs to read it.

``watchdog`` names the rank that keeps others waiting (``heartbeat``, ``hang_diagnosis``);
``failure_broadcast`` informs peers of a failure; ``comm_recorder`` lists a rank's communications,
and ``divergence`` compares such lists between ranks; ``replica_check`` compares values that must be
equal. All of it reads ``kenotron_dist.in_flight``,
in which each communication is noted. Public names are those of ``kenotron_dist``.
"""
