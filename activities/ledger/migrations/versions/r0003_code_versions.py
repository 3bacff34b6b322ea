"""versions of jobs' code."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Upgrade to this revision. There is no downgrade: restore a backup instead."""
    op.create_table(
        "code_versions",
        sa.Column("run", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("operator", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("asked_ns", sa.BigInteger(), nullable=False),
        sa.Column("changed", sa.String(), nullable=False),
        sa.Column("ended", sa.String(), nullable=False),
        sa.Column("version", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("seen_ns", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["jobs.run"], name=op.f("fk_code_versions_run")),
        sa.PrimaryKeyConstraint("run", "number", name=op.f("pk_code_versions")),
    )
