BEGIN TRANSACTION;
CREATE TABLE "_sqlite_migrations" (
   "id" INTEGER PRIMARY KEY,
   "migration_set" TEXT,
   "name" TEXT,
   "applied_at" TEXT
);
INSERT INTO "_sqlite_migrations" VALUES(1,'pidispatch','001-first','2026-11-30 17:26:02.907217+00:00');
CREATE TABLE counters (name TEXT PRIMARY KEY, n INTEGER NOT NULL) STRICT;
INSERT INTO "counters" VALUES('queued',3);
CREATE TABLE deliveries (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, state TEXT NOT NULL,
    body_sha TEXT NOT NULL, received_at REAL NOT NULL, event_at REAL NOT NULL,
    target TEXT NOT NULL, pending TEXT, attempts INTEGER NOT NULL DEFAULT 0,
    next_at REAL, base TEXT, request_sha TEXT
) STRICT;
INSERT INTO "deliveries" VALUES('gh-set','github','admitted','sha-1',1800000000.0,1800000000.0,'octo/spoon#7',NULL,0,NULL,NULL,NULL);
INSERT INTO "deliveries" VALUES('gh-no','github','admitted','sha-2',1800000000.0,1800000000.0,'octo/spoon#8',NULL,0,NULL,NULL,NULL);
INSERT INTO "deliveries" VALUES('gh-later','github','admitted','sha-3',1800000000.0,1800000000.0,'octo/spoon#9',NULL,0,NULL,NULL,NULL);
INSERT INTO "deliveries" VALUES('gh-waiting','github','pending','sha-4',1800000000.0,1800000000.0,'octo/spoon#10','[{"id":"gh-waiting","event":{"forge":"github","delivery":"waiting","name":"issues.labeled","kind":"label","action":"labeled","repo":"octo/spoon","repo_id":null,"target":{"type":"issue","number":10},"actor":{"id":"42","login":"octocat"},"author":null,"association":null,"labels":["pi:urgent"],"added":["pi:urgent"],"comment":null,"comment_id":null,"review_state":null,"review":null,"head":null,"when":null,"fault":null},"body_sha":"sha-4","received":1800000000.0},{"rule":{"index":0,"on":{"type":"label","any":["pi:urgent"]},"run":{"kind":"github","flow":"fix-issue"}},"flow":"fix-issue","by":"pi:urgent"}]',0,1800000000.0,NULL,NULL);
CREATE TABLE flags (name TEXT PRIMARY KEY, value TEXT NOT NULL, at REAL NOT NULL)
    STRICT;
INSERT INTO "flags" VALUES('instance','16b6ba0060c7',1800000000.0);
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    set_id TEXT NOT NULL, state TEXT NOT NULL, payload TEXT, claim TEXT,
    attempt INTEGER NOT NULL DEFAULT 0, deferrals INTEGER NOT NULL DEFAULT 0,
    not_before REAL NOT NULL DEFAULT 0, queued_at REAL NOT NULL, started_at REAL,
    ended_at REAL, work TEXT, notice TEXT, publish_tries INTEGER NOT NULL DEFAULT 0,
    cancel TEXT
) STRICT;
INSERT INTO "jobs" VALUES(1,'gh-set-r1','gh-set','done','{"id":"gh-set-r1","set":"gh-set","kind":"github","repo":"octo/spoon","target":{"type":"issue","number":7},"flow":"fix-issue","dedup":"octo/spoon#7:fix-issue:r1","run":{"kind":"github","flow":"fix-issue","replicas":2},"trigger":{"event":"issues.labeled","action":"labeled","delivery":"set","sender":"42","index":0,"type":"label","by":"pi:urgent"},"replica":1,"replicas":2}',NULL,1,0,0.0,1800000000.0,1800000000.0,1800000000.0,NULL,NULL,0,NULL);
INSERT INTO "jobs" VALUES(2,'gh-set-r2','gh-set','running','{"id":"gh-set-r2","set":"gh-set","kind":"github","repo":"octo/spoon","target":{"type":"issue","number":7,"title":"A title","body":"A body"},"flow":"fix-issue","dedup":"octo/spoon#7:fix-issue:r2","run":{"kind":"github","flow":"fix-issue","replicas":2},"trigger":{"event":"issues.labeled","action":"labeled","delivery":"set","sender":"42","index":0,"type":"label","by":"pi:urgent"},"replica":2,"replicas":2}','fd1f2395804d5faa',1,0,0.0,1800000000.0,1800000000.0,NULL,NULL,NULL,0,NULL);
INSERT INTO "jobs" VALUES(3,'gh-no','gh-no','done','{"id":"gh-no","set":"gh-no","kind":"github","repo":"octo/spoon","target":{"type":"issue","number":8},"flow":"fix-issue","dedup":"octo/spoon#8:fix-issue","run":{"kind":"github","flow":"fix-issue"},"trigger":{"event":"issues.labeled","action":"labeled","delivery":"no","sender":"42","index":0,"type":"label","by":"pi:urgent"}}',NULL,0,0,0.0,1800000000.0,NULL,1800000000.0,NULL,NULL,0,NULL);
INSERT INTO "jobs" VALUES(4,'gh-later','gh-later','queued','{"id":"gh-later","set":"gh-later","kind":"github","repo":"octo/spoon","target":{"type":"issue","number":9,"title":"A title","body":"It''s text; with a semicolon"},"flow":"fix-issue","dedup":"octo/spoon#9:fix-issue","run":{"kind":"github","flow":"fix-issue"},"trigger":{"event":"issues.labeled","action":"labeled","delivery":"later","sender":"42","index":0,"type":"label","by":"pi:urgent"}}',NULL,0,0,0.0,1800000000.0,NULL,NULL,NULL,NULL,0,NULL);
CREATE TABLE label_memory (
    kind TEXT NOT NULL, target TEXT NOT NULL, labels TEXT NOT NULL,
    seen_at REAL NOT NULL, PRIMARY KEY (kind, target)
) STRICT;
CREATE TABLE ledger (
    id INTEGER PRIMARY KEY, job_id TEXT NOT NULL, attempt INTEGER NOT NULL,
    reserved_at REAL NOT NULL, state TEXT NOT NULL, tokens_reserved INTEGER,
    tokens INTEGER, cost REAL, scope TEXT
) STRICT;
INSERT INTO "ledger" VALUES(1,'gh-set-r1',1,1800000000.0,'kept',NULL,10,0.5,NULL);
INSERT INTO "ledger" VALUES(2,'gh-set-r2',1,1800000000.0,'reserved',NULL,NULL,NULL,NULL);
CREATE TABLE poll_cursors (
    repo TEXT NOT NULL, stream TEXT NOT NULL, cursor TEXT, etag TEXT,
    PRIMARY KEY (repo, stream)
) STRICT;
CREATE TABLE pushes (
    kind TEXT NOT NULL, target TEXT NOT NULL, replica INTEGER, tip TEXT NOT NULL,
    at REAL NOT NULL
) STRICT;
INSERT INTO "pushes" VALUES('github','octo/spoon#7',1,'cccccccccccccccccccccccccccccccccccccccc',1800000000.0);
CREATE TABLE runs (
    job_id TEXT PRIMARY KEY, set_id TEXT NOT NULL, ended_at REAL NOT NULL,
    record TEXT NOT NULL, request TEXT
) STRICT;
INSERT INTO "runs" VALUES('gh-set-r1','gh-set',1800000000.0,'{"jobId":"gh-set-r1","kind":"github","target":"octo/spoon#7","flow":"fix-issue","queuedAt":"","startedAt":null,"endedAt":"","outcome":"completed","reason":null,"exitCode":0,"turns":1,"tokens":{"input":1,"output":2,"cacheRead":3,"cacheWrite":4,"total":10,"cost":0.5},"forks":null,"provider":"p","model":"m","budgetReserved":true,"attempt":1,"replica":1,"replicas":2,"triggerIndex":0,"triggerType":"label","session":null,"bundle":false,"host":"h"}','{"number":12,"url":"https://host/octo/spoon/pull/12","title":"[r1/2] Bend"}');
INSERT INTO "runs" VALUES('gh-no','gh-no',1800000000.0,'{"jobId":"gh-no","kind":"github","target":"octo/spoon#8","flow":"fix-issue","queuedAt":"","startedAt":null,"endedAt":"","outcome":"policy","reason":"job-image-missing","exitCode":0,"turns":1,"tokens":null,"forks":null,"provider":"p","model":"m","budgetReserved":true,"attempt":1,"replica":null,"replicas":null,"triggerIndex":0,"triggerType":"label","session":null,"bundle":false,"host":"h"}',NULL);
CREATE TABLE windows (
    kind TEXT NOT NULL, key TEXT NOT NULL, opened_at REAL NOT NULL,
    job_id TEXT NOT NULL
) STRICT;
INSERT INTO "windows" VALUES('github','octo/spoon#7:fix-issue:r1',1800000000.0,'gh-set-r1');
INSERT INTO "windows" VALUES('github','octo/spoon#7:fix-issue:r2',1800000000.0,'gh-set-r2');
INSERT INTO "windows" VALUES('github','octo/spoon#9:fix-issue',1800000000.0,'gh-later');
CREATE UNIQUE INDEX "idx__sqlite_migrations_migration_set_name"
    ON "_sqlite_migrations" ("migration_set", "name");
CREATE UNIQUE INDEX deliveries_body ON deliveries (kind, body_sha);
CREATE INDEX deliveries_target ON deliveries (target, received_at);
CREATE INDEX deliveries_pending ON deliveries (next_at) WHERE state = 'pending';
CREATE INDEX jobs_queued ON jobs (seq) WHERE state = 'queued';
CREATE INDEX jobs_open ON jobs (state) WHERE state <> 'done';
CREATE INDEX jobs_set ON jobs (set_id);
CREATE INDEX jobs_ended ON jobs (ended_at) WHERE state = 'done';
CREATE INDEX windows_key ON windows (kind, key, opened_at);
CREATE INDEX windows_job ON windows (job_id);
CREATE INDEX ledger_job ON ledger (job_id);
CREATE INDEX ledger_time ON ledger (reserved_at);
CREATE INDEX runs_ended ON runs (ended_at);
CREATE INDEX pushes_target ON pushes (kind, target);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('jobs',4);
COMMIT;
