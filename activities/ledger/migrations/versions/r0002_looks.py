"""samples of ranks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Upgrade to this revision. There is no downgrade: restore a backup instead."""
    op.create_table(
        "incident_looks",
        sa.Column("run", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("look", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("machine", sa.String(), nullable=False),
        sa.Column("time_ns", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run", "number"], ["incidents.run", "incidents.number"], name=op.f("fk_incident_looks_run_number")
        ),
        sa.PrimaryKeyConstraint("run", "number", "look", "machine", name=op.f("pk_incident_looks")),
    )
