"""Rules for lines about disks, mounts, remote storage and damaged data."""

from __future__ import annotations

from everstep.decisions.blame.classify.rule import ERRNO, KERNEL, FaultClass, LogRule
from everstep.model.finding import Owner

OBJECT_STORE = (
    r"botocore\.awsrequest\.|AWSHTTPS?ConnectionPool\(|google\.api_core\.exceptions\.(?:ServiceUnavailable"
    "|InternalServerError|TooManyRequests|DeadlineExceeded|GatewayTimeout|BadGateway|RetryError)"
    r"|(?:HTTPS?ConnectionPool\(host='|[Cc]annot connect to host |timeout to host https?://)[\w.-]*"
    r"(?:\bstorage\.googleapis\.com|\.blob\.core\.windows\.net)"
    r"|(?:[Cc]annot connect to host |timeout to host https?://)[\w.-]*\bs3[\w.-]*\.amazonaws\.com"
)
"""A failed request of an object store's client, though its line has the words of a failed request to any service."""
STORAGE_RULES = (
    LogRule(
        "disk-quota",
        FaultClass.DISK_FULL,
        Owner.STORAGE,
        hints="quota exceeded",
        pattern=r"Disk quota exceeded|\[Errno 122\]",
        source=ERRNO + ", EDQUOT",
        matches=("OSError: [Errno 122] Disk quota exceeded: '/home/ada/ckpt'",),
        misses=("quota exceeded by 0 %",),
    ),
    LogRule(
        "disk-full",
        FaultClass.DISK_FULL,
        Owner.STORAGE,
        hints="no space left|errno 28|disk is full|ephemeral-storage",
        pattern=r"No space left on device|\[Errno 28\]|\bdisk is full\b",
        source=ERRNO + ", ENOSPC",
        matches=(
            "OSError: [Errno 28] No space left on device",
            "zstd: error 70 : Write error : cannot write block : No space left on device",
        ),
        misses=("no space left of the sign",),
    ),
    LogRule(
        "file-replaced",
        FaultClass.MOUNT,
        Owner.UNKNOWN,
        hints="stale file handle",
        pattern=r"Stale file handle: '[^']*(?:/\.?cache/|/tmp|\.lock|\.arrow|\.incomplete)",
        source=ERRNO + ", ESTALE of a file of a cache: another process replaced it, or the server lost it",
        matches=("OSError: [Errno 116] Stale file handle: '/shared/cache/datasets/json/cache-21.arrow'",),
        misses=("OSError: [Errno 116] Stale file handle: '/mnt/data/shard'",),
    ),
    LogRule(
        "mount-stale",
        FaultClass.MOUNT,
        Owner.STORAGE,
        hints=(
            "stale file handle|transport endpoint|errno 116|errno 107|nfs: server|wrong fs type|mount failed"
            "|failedmount|mountvolume|mount.nfs|mount:|lustre"
        ),
        pattern=(
            r"Stale file handle|Transport endpoint is not connected|nfs: server \S+ not responding"
            r"|wrong fs type, bad option|FailedMount|MountVolume\.\w+ failed|mount\.nfs\w*: .*(?:refused|timed out"
            "|denied|failed)|Unable to attach or mount volumes|mount: .*(?:can't find|does not exist"
            "|permission denied|failed)|LustreError: "
        ),
        source="Linux, NFS, FUSE, Kubernetes",
        matches=(
            "OSError: [Errno 116] Stale file handle: '/mnt/data/shard'",
            "nfs: server 10.0.0.9 not responding, still trying",
            "OSError: [Errno 107] Transport endpoint is not connected: '/mnt/s3'",
            'Warning  FailedMount  kubelet  MountVolume.SetUp failed for volume "data": mount failed: exit status 32',
            "mount: /mnt/data: wrong fs type, bad option, bad superblock on /dev/sdb1",
        ),
        misses=("mount: ok", "the mount point is free"),
    ),
    LogRule(
        "disk-read-only",
        FaultClass.DISK_FAULT,
        Owner.MACHINE,
        hints="remounting filesystem read-only",
        pattern="Remounting filesystem read-only",
        source=KERNEL,
        matches=("EXT4-fs (nvme0n1p1): Remounting filesystem read-only",),
        misses=("mounted read-only by wish", "OSError: [Errno 30] Read-only file system: '/scratch/x'"),
    ),
    LogRule(
        "read-only-file-system",
        FaultClass.DISK_FAULT,
        Owner.UNKNOWN,
        hints="read-only file system|errno 30",
        pattern=r"Read-only file system|\[Errno 30\]",
        source=ERRNO + ", EROFS: a disk with errors, a mount option or the image of a container",
        matches=("OSError: [Errno 30] Read-only file system: '/scratch/x'",),
        misses=("mounted read-only by wish",),
    ),
    LogRule(
        "remote-io-error",
        FaultClass.REMOTE_STORAGE,
        Owner.STORAGE,
        hints="input/output error|errno 5]",
        pattern=(
            r"Input/output error: "
            r"b?['\"]?(?:/[^'\"]*?)?/[^'\"/]*(?:nfs|lustre|gpfs|beegfs|weka|ceph|efs|fsx|vast|gcs|juicefs"
            r"|s3|fuse|shared|pfs|hdfs|gdrive|content/drive)"
        ),
        source=ERRNO + ", EIO, of a path that names a file system that machines share",
        matches=(
            "OSError: [Errno 5] Input/output error: '/mnt/nfs/data.bin'",
            "OSError: [Errno 5] Input/output error: '/fsx/ckpt/iter_30/mp_rank_00.pt'",
        ),
        misses=(
            "OSError: [Errno 5] Input/output error: '/scratch/shard-3'",
            "Buffer I/O error on dev nvme0n1, logical block 1234, async page read",
        ),
    ),
    LogRule(
        "io-error",
        FaultClass.DISK_FAULT,
        Owner.UNKNOWN,
        hints="input/output error|errno 5]",
        pattern=r"\[Errno 5\] Input/output error|: Input/output error",
        source=ERRNO + ", EIO: the text does not show whether a disk or a server failed",
        matches=("OSError: [Errno 5] Input/output error: '/scratch/shard-3'",),
        misses=("input/output errors: 0",),
    ),
    LogRule(
        "checkpoint-write-failed",
        FaultClass.REMOTE_STORAGE,
        Owner.STORAGE,
        hints="pytorchstreamwriter|unexpected pos|file write failed",
        pattern=r"PytorchStreamWriter failed|unexpected pos \d+ vs \d+|: file write failed",
        source="torch.save: a write to the file failed or was short",
        matches=(
            "RuntimeError: [enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0",
            "RuntimeError: PytorchStreamWriter failed writing file data/0: file write failed",
        ),
        misses=("RuntimeError: PytorchStreamReader failed reading zip archive", "unexpected position of the cursor"),
        vague=True,
    ),
    LogRule(
        "disk-io-error",
        FaultClass.DISK_FAULT,
        Owner.MACHINE,
        hints="i/o error|nvme|disk failure|failing i/o|beyond end of device",
        pattern=(
            r"Buffer I/O error on dev|blk_update_request: I/O error|nvme\w*: I/O .* timeout, reset controller"
            "|nvme .*: Disabling device after reset failure|Disk failure on |no available path - failing I/O"
            r"|I/O error,? (?:while writing superblock|dev \w+, sector)|attempt to access beyond end of device"
        ),
        source=KERNEL,
        matches=(
            "Buffer I/O error on dev nvme0n1, logical block 1234, async page read",
            "nvme nvme0: I/O 7 QID 3 timeout, reset controller",
        ),
        misses=("OSError: [Errno 5] Input/output error: '/scratch/shard-3'", "nvme0n1: 3.8 TB"),
    ),
    LogRule(
        "remote-storage-denied",
        FaultClass.REMOTE_STORAGE,
        Owner.CODE,
        hints=(
            "accessdenied|nosuchbucket|invalidaccesskeyid|signaturedoesnotmatch|nocredentials"
            "|unable to locate credentials|nosuchkey|expiredtoken|credentials were not found"
        ),
        pattern=(
            r"\((?:AccessDenied|NoSuchBucket|NoSuchKey|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken)\)"
            "|NoCredentialsError|Unable to locate credentials|default credentials were not found"
        ),
        source="S3 error codes, botocore; Google Cloud",
        matches=(
            "botocore.exceptions.ClientError: An error occurred (AccessDenied) when calling the GetObject operation: "
            "Access Denied",
            "botocore.exceptions.NoCredentialsError: Unable to locate credentials",
        ),
        misses=("access denied by the guard",),
    ),
    LogRule(
        "java-class-clash",
        FaultClass.DEPENDENCY,
        Owner.CODE,
        hints="java.lang.",
        pattern=(
            r"java\.lang\.(?:NoSuchMethodError|NoSuchFieldError|NoClassDefFoundError|ClassNotFoundException"
            "|AbstractMethodError|IncompatibleClassChangeError|UnsupportedClassVersionError)"
            r"|java\.lang\.ClassCastException: (?:class )?(?:org\.apache\.hadoop|com\.google)\."
        ),
        source="Java, as Hadoop's libhdfs and Spark show it: the jars do not fit each other, or one is missing",
        matches=(
            "java.lang.ClassCastException: org.apache.hadoop.hdfs.protocol.proto.ClientNamenodeProtocolProtos"
            "$GetFileInfoRequestProto cannot be cast to com.google.protobuf.Message",
            "java.lang.NoSuchMethodError: com.google.common.base.Preconditions.checkArgument(ZLjava/lang/String;)V",
            "java.lang.RuntimeException: java.lang.ClassNotFoundException: Class "
            "org.apache.hadoop.hdfs.DistributedFileSystem not found",
            "(unable to get root cause for java.lang.NoClassDefFoundError)",
        ),
        misses=(
            "java.lang.ClassCastException: com.ada.Batch cannot be cast to com.ada.Row",
            "org.apache.hadoop.hdfs.BlockMissingException: Could not obtain block: BP-1",
            "java.lang.OutOfMemoryError: Java heap space",
        ),
    ),
    LogRule(
        "hdfs-call-failed",
        FaultClass.REMOTE_STORAGE,
        Owner.STORAGE,
        hints="hdfs|loadfilesystems",
        pattern=r"\b(?:hdfs\w+\b.*|loadFileSystems) error:\s*$",
        source="Hadoop: libhdfs; the next line has the Java exception",
        matches=(
            "hdfsExists: invokeMethod((Lorg/apache/hadoop/fs/Path;)Z) error:",
            "hdfsOpenFile(/data/part-7): FileSystem#open((Lorg/apache/hadoop/fs/Path;I)"
            "Lorg/apache/hadoop/fs/FSDataInputStream;) error:",
            "loadFileSystems error:",
        ),
        misses=("hdfs: mkdir: Connection refused", "hdfsExists: no error"),
        vague=True,
    ),
    LogRule(
        "remote-storage-retried",
        FaultClass.REMOTE_STORAGE,
        Owner.STORAGE,
        hints="aws_logging.cc|automatically retried in",
        pattern=(
            r"aws_logging\.cc:\d+\] (?:Curl returned error code \d|Request failed, now waiting \d)"
            r"|will be automatically retried in [\d.]+ seconds \(attempt \d+ out of \d+\)"
        ),
        source="TensorFlow: platform/s3, platform/cloud; each failed attempt writes one or two lines",
        matches=(
            "E tensorflow/core/platform/s3/aws_logging.cc:60] Curl returned error code 28",
            "W tensorflow/core/platform/s3/aws_logging.cc:57] Request failed, now waiting 6400 ms before attempting "
            "again.",
            "I tensorflow/tsl/platform/cloud/retrying_utils.cc:73] The operation failed and will be automatically "
            "retried in 1.38 seconds (attempt 1 out of 10), caused by: Unavailable: Error executing an HTTP request",
        ),
        misses=(
            "I tensorflow/core/platform/s3/aws_logging.cc:54] Connection has been released. Continuing.",
            "RuntimeError: curl returned error code 28",
        ),
        times=3,
    ),
    LogRule(
        "remote-storage",
        FaultClass.REMOTE_STORAGE,
        Owner.STORAGE,
        hints=(
            "botocore|slowdown|s3|hdfs|gcsfs|google.api_core|fsspec|webhdfs|dfsclient|namenode|datanode|blockmissing"
            "|azure|aws error|could not connect to the endpoint|fstimeouterror|(read)|awshttp|storage.googleapis.com"
            "|core.windows.net|amazonaws.com|retry attempts failed|unable to connect to endpoint"
        ),
        pattern=(
            r"botocore\.\w*\.?(?:EndpointConnection|ConnectTimeout|ReadTimeout|ConnectionClosed|IncompleteRead"
            r"|ResponseStreaming|SSL)\w*Error|Could not connect to the endpoint URL|\((?:SlowDown|InternalError"
            r"|ServiceUnavailable|503|500)\) when calling|(?:hdfs|HDFS|DFSClient|DFSInputStream).*(?:Exception|failed"
            r"|error|Could not obtain block)|BlockMissingException|SafeModeException|gcsfs\.\w+\.HttpError"
            rf"|{OBJECT_STORE}|\bgcsfs\b.*out of retries on exception"
            r"|All \d+ retry attempts failed\. The last failure: |errors_impl\.\w+: .*Unable to connect to endpoint"
            r"|azure\.core\.exceptions\.(?:ServiceRe|Http)\w+Error|AWS Error (?:NETWORK_CONNECTION"
            r"|SLOW_DOWN|INTERNAL_FAILURE|UNKNOWN)|\bFSTimeoutError\b"
            r"|(?:gsutil|gcloud storage|aws s3|s3cmd|azcopy|hdfs dfs|rclone)\b.*\): exit [1-9]\d* \(read\)"
        ),
        source="botocore, HDFS, Google Cloud, Azure, pyarrow, fsspec, webdataset",
        matches=(
            "botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL: "
            '"http://127.0.0.1:9/data"',
            "botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the PutObject operation: "
            "reduce your rate",
            "org.apache.hadoop.hdfs.BlockMissingException: Could not obtain block: BP-1",
            "fsspec.exceptions.FSTimeoutError: Caught FSTimeoutError in DataLoader worker process 1.",
            "OSError: ((' gsutil cat gs://data/train/20.tar',), {'shell': True}): exit 1 (read) {'rank': -1}",
            "OSError: When reading information for key 'a' in bucket 'b': AWS Error NETWORK_CONNECTION during "
            "HeadObject operation",
            "google.api_core.exceptions.RetryError: Timeout of 120.0s exceeded, last exception: "
            "HTTPSConnectionPool(host='storage.googleapis.com', port=443): Read timed out. (read timeout=60)",
            "urllib3.exceptions.ReadTimeoutError: AWSHTTPSConnectionPool(host='b.s3.amazonaws.com', port=443): Read "
            "timed out.",
            "aiohttp.client_exceptions.ServerTimeoutError: Connection timeout to host "
            "https://b.s3.us-east-1.amazonaws.com/7.tar",
            "ERROR:gcsfs:_request out of retries on exception: Cannot connect to host storage.googleapis.com:443",
            "tensorflow.python.framework.errors_impl.AbortedError: All 10 retry attempts failed. The last failure: "
            "Error executing an HTTP request: libcurl code 28 meaning 'Timeout was reached'",
        ),
        misses=("s3 downloads: 12 files", "hdfs put done", "aws s3 cp: exit 0 (read)", "tenacity.RetryError: x"),
    ),
    LogRule(
        "safe-checkpoint-damaged",
        FaultClass.DATA_ERROR,
        Owner.DATA,
        hints="safetensor|pytorchstreamreader|corruptcheckpoint|invalid header|unpickling|metadata",
        pattern=(
            "PytorchStreamReader failed|SafetensorError|InvalidHeaderDeserialization|MetadataIncompleteBuffer"
            r"|CorruptCheckpoint|UnpicklingError|unexpected EOF, expected \d+ more bytes"
        ),
        source="torch.load, safetensors, everstep: a stored state that cannot be read",
        matches=(
            "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
            "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully "
            "covered",
            "_pickle.UnpicklingError: pickle data was truncated",
        ),
        misses=("the safetensors header is valid",),
    ),
    LogRule(
        "damaged-data",
        FaultClass.DATA_ERROR,
        Owner.DATA,
        hints=(
            "unidentifiedimage|image file|jsondecodeerror|badzipfile|badgzipfile|zlib.error|arrowinvalid"
            "|unicodedecodeerror|truncated|corrupt|parquet|crc|lzma|eoferror|compressed data ended|tar|datalosserror"
            "|data loss|data_loss|readerror|thrift|data stream|.idx|index file|bad header|bad version"
        ),
        pattern=(
            r"UnidentifiedImageError|cannot identify image file ['<]|image file is truncated"
            "|(?:broken|unrecognized) data stream (?:contents )?when reading image"
            r"|JSONDecodeError|BadZipFile|BadGzipFile|zlib\.error"
            r"|ArrowInvalid.*(?:[Cc]orrupt|[Pp]arquet|snappy|magic)|UnicodeDecodeError|tarfile\.ReadError|LZMAError"
            "|Compressed file ended before|Parquet magic bytes not found|(?:crc|CRC)(?:32)? (?:check )?(?:mismatch"
            "|failed)|cannot reshape array of size|DataCorruption"
            r"|\berrors(?:_impl)?\.DataLossError\b|(?:DataLossError|Data loss|DATA_LOSS):\s+(?:corrupted|truncated) "
            "record|OSError: (?:Corrupt |Couldn't deserialize thrift)"
            r"|(?<![\w.])ReadError: .*(?:unexpected end of data|(?:invalid|empty|truncated) header|bad checksum"
            "|not a gzip file)|bad (?:header|version), cannot read: |Index file doesn't match expected format"
            r"|\.idx\b.*(?:[Cc]orrupt|(?:invalid|bad) magic)|(?:[Cc]orrupt|(?:invalid|bad) magic).*\.idx\b"
        ),
        source="Python, PIL, pyarrow, TensorFlow, webdataset, Megatron-LM: input that cannot be read",
        matches=(
            "PIL.UnidentifiedImageError: cannot identify image file '/data/3.jpg'",
            "OSError: cannot identify image file <_io.BufferedReader name='/data/n01/n01_64.JPEG'>",
            "json.decoder.JSONDecodeError: Expecting ',' delimiter: line 1 column 22 (char 21)",
            "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
            "pyarrow.lib.ArrowInvalid: Parquet magic bytes not found in footer. Either the file is corrupted or this "
            "is not a parquet file.",
            "OSError: Corrupt snappy compressed data.",
            "tensorflow.python.framework.errors_impl.DataLossError:  corrupted record at 0",
            "ReadError: unexpected end of data",
            "AssertionError: bad header, cannot read: /data/merged.idx",
        ),
        misses=(
            "corrupt=0",
            "truncated to 2048 tokens",
            "ValueError: cannot identify image file format",
            "ValueError: the record is corrupt",
            "train.DataLossError: the loss of the data is negative",
            "httpx.ReadError: the read failed",
            "AssertionError: the index of the batch is corrupt",
        ),
    ),
    LogRule(
        "dataset-index",
        FaultClass.DATA_ERROR,
        Owner.DATA,
        hints="indexed_dataset.py",
        pattern=(
            r"/(?:megatron|fairseq)/\S*indexed_dataset\.py\", line \d+, in __init__ (?:assert .*(?:sequence_lengths"
            r"|document_indices|header|version|magic)\b.* AssertionError|.* ValueError: buffer is smaller than "
            "requested size)"
        ),
        source="Megatron-LM, fairseq: the index of a dataset does not fit its data; only the frame shows it",
        matches=(
            'File "/job/Megatron-LM/megatron/core/datasets/indexed_dataset.py", line 293, in __init__ assert '
            "self.sequence_lengths.shape[0] == self.document_indices[-1] AssertionError",
        ),
        misses=(
            'File "/job/train.py", line 293, in __init__ assert self.sequence_lengths == 3 AssertionError',
            'File "/job/megatron/core/datasets/indexed_dataset.py", line 500, in __init__ assert not mmap, '
            '"S3 needs a cache" AssertionError: S3 needs a cache',
            'File "/job/megatron/core/datasets/indexed_dataset.py", line 90, in read assert self._cache is not None '
            "AssertionError",
        ),
        of_frame=True,
    ),
)
