#!/bin/sh
# Creates a root file system like that of debian:bookworm-slim.
#
#   tools/images/base.sh SUITE FOLDER [MIRROR]
set -eu
debootstrap --variant=minbase "$@"
cd "$2"
# Leave out the same files as Debian's slim images, except copyright files. A build starts no daemon.
printf 'path-exclude /usr/share/%s/*\n' doc man locale info lintian groff > etc/dpkg/dpkg.cfg.d/docker
echo 'path-include /usr/share/doc/*/copyright' >> etc/dpkg/dpkg.cfg.d/docker
printf '#!/bin/sh\nexit 101\n' > usr/sbin/policy-rc.d
chmod 755 usr/sbin/policy-rc.d
echo 'Apt::Install-Suggests "false"; Acquire::Languages "none"; Dir::Cache::pkgcache ""; Dir::Cache::srcpkgcache "";' \
  > etc/apt/apt.conf.d/docker
echo 'DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb || true"; };' >> etc/apt/apt.conf.d/docker
find usr/share/doc -mindepth 2 ! -name copyright ! -type d -delete
rm -rf usr/share/man/* usr/share/locale/* usr/share/info/* usr/share/lintian/* usr/share/groff/* \
  var/cache/apt/* var/lib/apt/lists/* var/log/* debootstrap
mkdir -p var/cache/apt/archives/partial var/lib/apt/lists/partial
