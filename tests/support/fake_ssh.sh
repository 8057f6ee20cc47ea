#!/bin/sh
# Stands in for ssh: `fake_ssh.sh FOLDER OPTION... -- HOST [COMMAND]` executes FOLDER/HOST, if there
# is such a file, and then the command on this machine. With -G it prints the host as its address.
folder=$1
shift
resolve=no
while [ "$1" != -- ]; do
    [ "$1" = -G ] && resolve=yes
    shift
done
host=$2
if [ "$resolve" = yes ]; then
    echo "hostname $host"
    exit
fi
[ -e "$folder/$host" ] && . "$folder/$host"
unset NCCL_DEBUG # a server of ssh does not pass it on
exec sh -c "$3"
