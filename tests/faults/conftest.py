"""Settings of hypothesis for all attacks, and the seed at the head of the report."""

from fault_cases import FULL, SEED
from hypothesis import HealthCheck, settings

options = {"deadline": None, "database": None, "print_blob": True, "suppress_health_check": list(HealthCheck)}
settings.register_profile("faults", derandomize=not FULL, **options)
settings.load_profile("faults")


def pytest_report_header() -> str:
    return f"attacks: {'all' if FULL else 'a sample'}, FAULTS_SEED={SEED}"
