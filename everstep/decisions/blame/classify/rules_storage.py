"""Lines about disks, mounts and remote storage."""

from __future__ import annotations

from everstep.decisions.blame.classify.rule import FaultClass, LogRule
from everstep.model.finding import Owner

KERNEL = "Linux kernel log"
ERRNO = "Linux: text of errno"

STORAGE_RULES = (
    LogRule(
        "disk-quota",
        FaultClass.DISK_FULL,
        Owner.STORAGE,
        ("quota exceeded",),
        r"Disk quota exceeded|\[Errno 122\]",
        ERRNO + ", EDQUOT",
        ("OSError: [Errno 122] Disk quota exceeded: '/home/ada/ckpt'",),
        ("quota exceeded by 0 %",),
    ),
    LogRule(
        "disk-full",
        FaultClass.DISK_FULL,
        Owner.STORAGE,
        ("no space left", "errno 28", "disk is full", "ephemeral-storage"),
        r"No space left on device|\[Errno 28\]|\bdisk is full\b",
        ERRNO + ", ENOSPC",
        (
            "OSError: [Errno 28] No space left on device",
            "zstd: error 70 : Write error : cannot write block : No space left on device",
        ),
        ("no space left of the sign",),
    ),
    LogRule(
        "mount-stale",
        FaultClass.MOUNT,
        Owner.STORAGE,
        (
            "stale file handle",
            "transport endpoint",
            "errno 116",
            "errno 107",
            "nfs: server",
            "wrong fs type",
            "mount failed",
            "failedmount",
            "mountvolume",
            "mount.nfs",
            "mount:",
            "lustre",
        ),
        r"Stale file handle|Transport endpoint is not connected|nfs: server \S+ not responding"
        r"|wrong fs type, bad option"
        r"|FailedMount|MountVolume\.\w+ failed|mount\.nfs\w*: .*(?:refused|timed out|denied|failed)"
        r"|Unable to attach or mount volumes"
        r"|mount: .*(?:can't find|does not exist|permission denied|failed)|LustreError: ",
        "Linux, NFS, FUSE, Kubernetes",
        (
            "OSError: [Errno 116] Stale file handle: '/mnt/data/shard'",
            "nfs: server 10.0.0.9 not responding, still trying",
            "OSError: [Errno 107] Transport endpoint is not connected: '/mnt/s3'",
            'Warning  FailedMount  kubelet  MountVolume.SetUp failed for volume "data": mount failed: exit status 32',
            "mount: /mnt/data: wrong fs type, bad option, bad superblock on /dev/sdb1",
        ),
        ("mount: ok", "the mount point is free"),
    ),
    LogRule(
        "disk-read-only",
        FaultClass.DISK_FAULT,
        Owner.MACHINE,
        ("read-only file system", "remounting filesystem read-only", "errno 30"),
        r"Remounting filesystem read-only|Read-only file system",
        ERRNO + ", EROFS; " + KERNEL,
        (
            "EXT4-fs (nvme0n1p1): Remounting filesystem read-only",
            "OSError: [Errno 30] Read-only file system: '/scratch/x'",
        ),
        ("mounted read-only by wish",),
    ),
    LogRule(
        "disk-io-error",
        FaultClass.DISK_FAULT,
        Owner.MACHINE,
        (
            "input/output error",
            "i/o error",
            "i/o .* timeout",
            "nvme",
            "disk failure",
            "failing i/o",
            "beyond end of device",
        ),
        r"\[Errno 5\] Input/output error|: Input/output error|Buffer I/O error on dev|blk_update_request: I/O error"
        r"|nvme\w*: I/O .* timeout, reset controller|nvme .*: Disabling device after reset failure|Disk failure on "
        r"|no available path - failing I/O|I/O error,? (?:while writing superblock|dev \w+, sector)"
        r"|attempt to access beyond end of device",
        ERRNO + ", EIO; " + KERNEL,
        (
            "OSError: [Errno 5] Input/output error: '/scratch/shard-3'",
            "Buffer I/O error on dev nvme0n1, logical block 1234, async page read",
            "nvme nvme0: I/O 7 QID 3 timeout, reset controller",
        ),
        ("input/output errors: 0", "nvme0n1: 3.8 TB"),
    ),
    LogRule(
        "remote-storage-denied",
        FaultClass.REMOTE_STORAGE,
        Owner.CODE,
        (
            "accessdenied",
            "nosuchbucket",
            "invalidaccesskeyid",
            "signaturedoesnotmatch",
            "nocredentials",
            "unable to locate credentials",
            "nosuchkey",
            "expiredtoken",
            "credentials were not found",
        ),
        r"\((?:AccessDenied|NoSuchBucket|NoSuchKey|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken)\)"
        r"|NoCredentialsError"
        r"|Unable to locate credentials|default credentials were not found",
        "S3 error codes, botocore; Google Cloud",
        (
            "botocore.exceptions.ClientError: An error occurred (AccessDenied) when calling the GetObject "
            "operation: Access Denied",
            "botocore.exceptions.NoCredentialsError: Unable to locate credentials",
        ),
        ("access denied by the guard",),
    ),
    LogRule(
        "remote-storage",
        FaultClass.REMOTE_STORAGE,
        Owner.STORAGE,
        (
            "botocore",
            "slowdown",
            "s3",
            "hdfs",
            "gcsfs",
            "google.api_core",
            "fsspec",
            "webhdfs",
            "dfsclient",
            "namenode",
            "datanode",
            "blockmissing",
            "azure",
            "aws error",
            "could not connect to the endpoint",
        ),
        r"botocore\.\w*\.?(?:EndpointConnection|ConnectTimeout|ReadTimeout|ConnectionClosed|IncompleteRead"
        r"|ResponseStreaming|SSL)\w*Error"
        r"|Could not connect to the endpoint URL|\((?:SlowDown|InternalError|ServiceUnavailable|503|500)\) when calling"
        r"|(?:hdfs|HDFS|DFSClient|DFSInputStream).*(?:Exception|failed|error|Could not obtain block)"
        r"|BlockMissingException|SafeModeException"
        r"|gcsfs\.\w+\.HttpError|google\.api_core\.exceptions\.(?:ServiceUnavailable|InternalServerError"
        r"|TooManyRequests|DeadlineExceeded)"
        r"|azure\.core\.exceptions\.(?:ServiceRe|Http)\w+Error|AWS Error (?:NETWORK_CONNECTION|SLOW_DOWN"
        r"|INTERNAL_FAILURE|UNKNOWN)",
        "botocore, HDFS, Google Cloud, Azure, pyarrow",
        (
            "botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL: "
            '"http://127.0.0.1:9/data"',
            "botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the PutObject operation: "
            "reduce your rate",
            "org.apache.hadoop.hdfs.BlockMissingException: Could not obtain block: BP-1",
            "OSError: When reading information for key 'a' in bucket 'b': AWS Error NETWORK_CONNECTION during "
            "HeadObject operation",
        ),
        ("s3 downloads: 12 files", "hdfs put done"),
    ),
    LogRule(
        "safe-checkpoint-damaged",
        FaultClass.DATA_ERROR,
        Owner.DATA,
        ("safetensor", "pytorchstreamreader", "corruptcheckpoint", "invalid header", "unpickling", "metadata"),
        r"PytorchStreamReader failed|SafetensorError|InvalidHeaderDeserialization|MetadataIncompleteBuffer"
        r"|CorruptCheckpoint"
        r"|UnpicklingError|unexpected EOF, expected \d+ more bytes",
        "torch.load, safetensors, everstep: a stored state that cannot be read",
        (
            "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
            "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not "
            "fully covered",
            "_pickle.UnpicklingError: pickle data was truncated",
        ),
        ("the safetensors header is valid",),
    ),
    LogRule(
        "damaged-data",
        FaultClass.DATA_ERROR,
        Owner.DATA,
        (
            "unidentifiedimage",
            "image file is truncated",
            "jsondecodeerror",
            "badzipfile",
            "badgzipfile",
            "zlib.error",
            "arrowinvalid",
            "unicodedecodeerror",
            "truncated",
            "corrupt",
            "parquet",
            "crc",
            "lzma",
            "eoferror",
            "compressed data ended",
            "tar",
        ),
        r"UnidentifiedImageError|image file is truncated|JSONDecodeError|BadZipFile|BadGzipFile|zlib\.error"
        r"|ArrowInvalid.*(?:[Cc]orrupt|[Pp]arquet|snappy|magic)"
        r"|UnicodeDecodeError|tarfile\.ReadError|LZMAError|Compressed file ended before"
        r"|Parquet magic bytes not found|(?:crc|CRC)(?:32)? (?:check )?(?:mismatch|failed)"
        r"|cannot reshape array of size|DataCorruption",
        "Python, PIL, pyarrow: input that cannot be read",
        (
            "PIL.UnidentifiedImageError: cannot identify image file '/data/3.jpg'",
            "json.decoder.JSONDecodeError: Expecting ',' delimiter: line 1 column 22 (char 21)",
            "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
            "pyarrow.lib.ArrowInvalid: Parquet magic bytes not found in footer. Either the file is corrupted or "
            "this is not a parquet file.",
        ),
        ("corrupt=0", "truncated to 2048 tokens"),
    ),
)
"""The rules in the order in which they are tried."""
