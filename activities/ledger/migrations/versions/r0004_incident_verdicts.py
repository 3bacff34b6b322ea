"""what people decided about incidents."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Upgrade to this revision. There is no downgrade: restore a backup instead."""
    op.create_table(
        "incident_verdicts",
        sa.Column("run", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("time_ns", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("was", sa.String(), nullable=False),
        sa.Column("operator", sa.String(), nullable=False),
        sa.Column("note", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run", "number"], ["incidents.run", "incidents.number"], name=op.f("fk_incident_verdicts_run_number")
        ),
        sa.PrimaryKeyConstraint("run", "number", "time_ns", name=op.f("pk_incident_verdicts")),
    )
