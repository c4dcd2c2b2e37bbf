BEGIN TRANSACTION;
ALTER TABLE jobs ADD COLUMN scope TEXT;
UPDATE jobs SET scope = json_extract(payload, '$.kind') || ':'
    || lower(json_extract(payload, '$.repo'));
UPDATE ledger SET scope = (SELECT scope FROM jobs WHERE jobs.id = ledger.job_id);
UPDATE ledger SET scope = 'github:octo/spoon' WHERE id = 1;
INSERT INTO _sqlite_migrations (migration_set, name, applied_at)
    VALUES ('pidispatch', '002-caps', '2026-11-30 15:00:00');
COMMIT;
