-- Say that leases are still held: {holder, leases {id, fence, epoch, expiry known to the caller, taken, ttl, charges
-- {counter's place in KEYS, counter, units, place}}}. Live ones are renewed, expired ones revived, lost ones made
-- again. A lease that expired gets a new fence when its holder is another than before.
local holder, leases = unpack(request)
tidy()

local function hold(id, record)
  for _, part in ipairs(record[PARTS]) do
    if part[COUNTER] == HELD then held_add(part[KEY], id, record[EXPIRES]) end
    if part[GONE] then
      calendar_hold(part[KEY], part[PLACE], part[UNITS])
      part[GONE] = nil
    end
  end
  write_live(id, record)
end

local function make_again(id, taken, ttl, charges)
  local record = {LIVE, now + ttl, new_fence(), taken, 0, holder, {}}
  for _, charge in ipairs(charges) do
    local key, counter, units, place = KEYS[charge[1]], charge[2], charge[3], charge[4]
    if counter == RATE then rate_add(key, place, units) end
    if counter == CALENDAR then calendar_hold(key, place, units) end
    if units > 0 then put(record[PARTS], key, counter, units, place) end
  end
  hold(id, record)
  return {'recreated', record[FENCE], record[EXPIRES]}
end

local function reassert(id, fence, lease_epoch, expires, taken, ttl, charges)
  local record = read_record(id)
  if not record then
    if is_lost(lease_epoch, expires) then return make_again(id, taken, ttl, charges) end
    return {'expired', 0, 0}
  end
  if record[STATE] == SETTLED then return {'settled', 0, 0} end
  local live = record[EXPIRES] > now
  if is_fenced(record, holder, fence) or (live and record[HOLDER] ~= holder) then
    return {'fenced', record[FENCE], record[EXPIRES]}
  end
  if record[HOLDER] ~= holder then
    record[HOLDER], record[FENCE] = holder, new_fence()
  end
  record[EXPIRES] = math.max(record[EXPIRES], now + ttl)
  hold(id, record)
  return {live and 'kept' or 'revived', record[FENCE], record[EXPIRES]}
end

local answers = {}
for i, lease in ipairs(leases) do answers[i] = reassert(unpack(lease)) end
return answer('reasserted', epoch, now, answers)
